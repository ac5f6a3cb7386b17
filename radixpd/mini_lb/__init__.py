"""The mini load balancer: requests go where their KV is. Policies, index and simulation are pure; fleet and proxy do the I/O."""
