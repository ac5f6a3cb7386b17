"""Programs in the frontend language: each is a script that takes the URL of a server, and a test."""
