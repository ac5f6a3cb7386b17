"""Texts that `bench_codec` measures a codec's quality on: as unlike each other as ten short texts can be, written for this purpose.

The model reads the first part of each and is then asked, token by token, what comes next. Changing them changes the figures in docs/log.md.
"""

from __future__ import annotations

__all__ = ["TEXTS"]

LIGHTHOUSE = """The lighthouse at Carrow Point was older than the village it served. Nobody knew who had laid the first stones, but the
tower had been rebuilt twice, once after a fire and once after a storm that took the lantern room clean off and dropped it into the bay.
Martha Quill had kept the light for nineteen years. She wound the clockwork every four hours, trimmed the wick at dusk and wrote a line in
the log each morning: the wind, the glass, the number of sails. On the third of November she wrote something different. "A boat without
lamps," she wrote, "moving against the tide." She had watched it from the gallery until the mist closed over the water. It was long and
low, with six oars on each side, and it made no sound at all. When she went down to the harbour the next day and asked the fishermen
whether they had seen it, they looked at each other and then at their nets. Old Peter Hale was the only one who answered. "My grandfather
saw it," he said, "the year the herring failed." He would not say more than that. Martha walked home along the cliff path with her collar
turned up, thinking about the oars. It seemed to her that a boat which rowed so steadily must be going somewhere, and that whoever sat in
it must know the way. That evening she lit the lamp an hour early, and she did not close the shutters on the side that faced the sea."""

SCIENCE = """Water is one of the few common substances that expand when they freeze. In most liquids the molecules pack more closely as the
temperature falls, so that the solid sinks in its own melt. In water each molecule can form hydrogen bonds with four neighbours, and in
ice these bonds hold the molecules in an open hexagonal lattice with a good deal of empty space. The result is that ice is about nine
percent less dense than the liquid, and floats. This has large consequences for life on Earth. A lake that freezes from the top is
insulated by its own lid: the water below stays at about four degrees Celsius, the temperature at which liquid water is densest, and fish
can survive the winter there. If ice sank, lakes would freeze from the bottom up and many of them would never thaw completely. The same
expansion breaks rocks. Water seeps into cracks during the day, freezes at night, and pushes the walls of the crack apart with a pressure
of many atmospheres. Over thousands of years this process, called frost weathering, can reduce a mountain to gravel. The high specific
heat of water matters as well. It takes about four times as much energy to warm a kilogram of water by one degree as to warm a kilogram
of air, which is why coastal climates are mild and why the oceans store most of the heat that the planet absorbs from the Sun."""

CODE = '''class Inventory:
    """Counts of items by name, with a limit on the total."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.items: dict[str, int] = {}

    def total(self) -> int:
        return sum(self.items.values())

    def add(self, name: str, count: int = 1) -> None:
        if count <= 0:
            raise ValueError("count must be positive")
        if self.total() + count > self.limit:
            raise OverflowError(f"no room for {count} more of {name}")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name: str, count: int = 1) -> None:
        if self.items.get(name, 0) < count:
            raise KeyError(name)
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]


def test_add_and_remove() -> None:
    inventory = Inventory(limit=10)
    inventory.add("apple", 3)
    inventory.add("pear")
    assert inventory.total() == 4
    inventory.remove("apple", 2)
    assert inventory.items == {"apple": 1, "pear": 1}
    inventory.remove("pear")
    assert "pear" not in inventory.items


def test_limit() -> None:
    inventory = Inventory(limit=2)
    inventory.add("apple", 2)
    try:
        inventory.add("pear")
    except OverflowError as error:
        assert "no room" in str(error)
    else:
        raise AssertionError("the limit was not enforced")
'''

CHAT = """<|im_start|>system
You are a helpful assistant.<|im_end|>
<|im_start|>user
I have two hours before my train leaves. What can I see in the old town without rushing?<|im_end|>
<|im_start|>assistant
Two hours is enough for a pleasant walk. Start at the market square, which is ten minutes from the station. The town hall on its north side
has a clock with moving figures that perform at noon. From there, follow Mill Street down to the river. You will pass the cathedral; the
entrance is free, and the painted ceiling is worth a quarter of an hour. At the river, turn left and walk along the bank until you reach
the stone bridge. There is a small cafe at its foot where you can sit outside. Give yourself twenty minutes to walk back to the station.
<|im_end|>
<|im_start|>user
It might rain. Is there something indoors, and can I leave my suitcase somewhere?<|im_end|>
<|im_start|>assistant
Yes. There are lockers in the station hall, next to the ticket office; a large one costs four euros and takes coins only. If it rains, go to
the museum of printing behind the cathedral. It is small, so you can see all of it in an hour, and visitors are allowed to print a page on
one of the old hand presses. The covered market on Mill Street is also dry, and it is a good place to buy bread and cheese for the journey.
<|im_end|>
<|im_start|>user
Thank you. When should I be back at the latest?<|im_end|>
<|im_start|>assistant
Plan to be at the station fifteen minutes before departure, so that you have time to collect your suitcase and find the platform."""

TABLE = """# Monthly report

| month | orders | returns | revenue | remark |
|-------|--------|---------|---------|--------|
| January | 1204 | 61 | 48,160 | new catalogue |
| February | 1187 | 58 | 47,480 | |
| March | 1312 | 70 | 52,480 | spring sale |
| April | 1275 | 66 | 51,000 | |
| May | 1341 | 71 | 53,640 | |
| June | 1420 | 69 | 56,800 | second warehouse opened |
| July | 1398 | 75 | 55,920 | |
| August | 1290 | 64 | 51,600 | holidays |
| September | 1467 | 73 | 58,680 | |
| October | 1502 | 77 | 60,080 | autumn sale |

The average order was 40 in every month. Returns stayed at about five percent of orders. Revenue rose by a quarter between January and
October, mostly because of the second warehouse: orders that used to take four days now take two, and fewer customers cancel while they
wait. The two sales brought more orders, but no larger ones. For November and December we expect 1600 and 1900 orders. To handle them we
need three more people in packing and one in the service team, from the middle of November until the end of the year. The budget for this
has been approved. The catalogue for next year will be printed in the first week of December, two weeks earlier than last year."""

LETTER = """Dear Anna,

Thank you for your long letter, which reached me only yesterday because the pass was closed by snow. You ask how we are getting on in the
new house. The roof no longer leaks, and Thomas has built shelves along the whole of the north wall, so that the books are out of their
boxes at last. The children have discovered the stream behind the barn and come home wet every afternoon. Little Emma has decided that she
will be a miller when she grows up, and has made a wheel out of kindling that really turns. I am less certain of the garden. The soil is
thin and full of stones, and what the deer do not eat the snails do. But the old apple tree by the gate, which everyone told us to cut
down, has more blossom on it than I have ever seen on one tree, and in the evening when the light comes through it I forgive the house
everything. I have started teaching again, three mornings a week. There are eleven pupils between six and thirteen, all in one room with
one stove, and I have learned more from them than they have from me, chiefly about cows. You must come in September, when the roads are
good and the plums are ripe. Bring your paints, and do not bring presents. We have everything that we need except you.

With love from all of us,
Clara"""

RECIPE = """Potato and leek soup (serves four)

Ingredients:
- 3 large leeks
- 500 g floury potatoes
- 40 g butter
- 1 litre vegetable stock
- 150 ml cream
- salt, pepper, a little nutmeg
- a handful of chives

Method:
1. Cut the leeks in half lengthwise and wash them well, since there is often sand between the leaves. Slice them thinly.
2. Peel the potatoes and cut them into cubes of about two centimetres.
3. Melt the butter in a large pot over a low heat. Add the leeks and a pinch of salt, cover the pot and let them soften for ten minutes.
They should not turn brown.
4. Add the potatoes and the stock. Bring to the boil, then simmer for twenty minutes until the potatoes fall apart when pressed.
5. Take the pot off the heat and blend the soup until it is smooth. If it is too thick, add a little water.
6. Stir in the cream, season with pepper and nutmeg, and warm the soup again without letting it boil.
7. Serve in deep bowls with the chopped chives on top and slices of toasted bread on the side.

Notes: The soup keeps for three days in the refrigerator. To freeze it, leave out the cream and add it after thawing. For a richer version,
fry some cubes of bacon until crisp and scatter them over the soup just before serving. For a vegan version, use oil instead of butter and
oat cream instead of cream; the taste is slightly sweeter."""

HISTORY = """Before the telegraph, news travelled at the speed of a horse or a ship. A merchant in London who wanted to know the price of
cotton in Alexandria waited five weeks for the answer, and by then the price had changed. The optical telegraph, built in France in the
1790s, was the first system that carried messages faster than any traveller. It consisted of towers about ten kilometres apart, each with
a pair of jointed arms on its roof that could be set in almost a hundred positions. An operator watched the next tower through a telescope
and copied its signal with his own arms. In clear weather a short message crossed the country in less than half an hour. At night and in
fog the line was dead. The electric telegraph removed this limit in the 1840s. A single wire on wooden poles cost far less than a chain of
towers, worked in the dark and needed trained people only at its ends. Railways adopted it first, because they had to know where their
trains were. Newspapers followed, and then banks. In 1866, after two failures, a cable was laid across the Atlantic that lasted, and the
time it took for news to pass between Europe and America fell from ten days to a few minutes. Prices on the two sides of the ocean began
to move together. Historians have called the network of cables that covered the world by 1900 the first internet, and although the
comparison is loose, the complaints of that time about haste, gossip and information without end sound very familiar."""

RULES = """Article 1. The society is called the Riverside Reading Society. Its seat is in the public library.
Article 2. The purpose of the society is to promote reading, to maintain a collection of books for its members, and to hold public lectures.
Article 3. Any person of at least sixteen years of age may become a member. Applications are made in writing to the secretary. The committee
decides on them within one month. If an application is refused, the applicant may appeal to the next general meeting.
Article 4. Members pay an annual fee, the amount of which is fixed by the general meeting. Students and members without income pay half.
Article 5. Membership ends by resignation, by death or by exclusion. A member may resign at the end of any calendar year by giving notice of
one month. A member who has not paid the fee for two years, in spite of two reminders, may be excluded by the committee.
Article 6. The general meeting takes place once a year, in the first quarter. The committee sends the agenda to all members at least two
weeks before the meeting. An extraordinary meeting must be called if one fifth of the members ask for it in writing, giving their reasons.
Article 7. The general meeting elects the committee, approves the accounts, and decides on changes to these articles. Each member has one
vote. Decisions are taken by a simple majority of those present; changes to the articles require two thirds.
Article 8. The committee consists of the president, the secretary, the treasurer and two further members. It is elected for two years."""

DIALOGUE = """"You are late," said the clockmaker without looking up.
"The bridge was closed," said the boy. "They are mending the middle arch."
"They have been mending the middle arch since I was your age. What have you brought me?"
The boy put the parcel on the bench and untied the string. Inside, wrapped in a piece of green cloth, lay a watch the size of a walnut. The
case was dented, and the glass was gone.
"Who gave you this?"
"A woman at the inn. She said that it stopped on the night her brother went away, and that she wants it to go again. She said you would know
it."
The clockmaker held the watch under the lamp for a long time. He turned it over and read what was engraved on the back, and his lips moved.
Then he opened a drawer, took out a glass and screwed it into his eye.
"I made it," he said at last. "Thirty years ago, in this room. Look here: the wheel with the nick in it. I was young and careless, and I
filed one tooth too short. It has lost a minute a day ever since, and I never told anyone."
"Can you mend it?"
"I can make it go. Whether I should correct it is another question. If it had kept perfect time, she would have been at the harbour a minute
later every evening, and perhaps she would never have met the man she married." He smiled for the first time. "What do you think, boy? Would
you mend the tooth?"
The boy thought about it. "I would ask her," he said."""

TEXTS = (LIGHTHOUSE, SCIENCE, CODE, CHAT, TABLE, LETTER, RECIPE, HISTORY, RULES, DIALOGUE)
