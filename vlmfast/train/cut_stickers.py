"""Cuts the sticker pictures out of Noto Color Emoji, once, for a maintainer who adds one.

Owns the tables of (name, plural, character): those that scenes are made of, and some that no training picture ever
holds, to score how a model does on things it never saw. The pictures and `index.json` it writes are package data beside
this file; nothing at run time needs the font. Run: `python -m vlmfast.train.cut_stickers NotoColorEmoji.ttf`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FONT_PIXELS = 109  # the only size the font's bitmaps have; one glyph is 136 x 128
STICKER_PIXELS = 112

STICKERS = """
dog dogs 🐶|cat cats 🐱|rabbit rabbits 🐰|fox foxes 🦊|panda pandas 🐼|lion lions 🦁|pig pigs 🐷|frog frogs 🐸
monkey monkeys 🐵|penguin penguins 🐧|owl owls 🦉|horse horses 🐴|bee bees 🐝|butterfly butterflies 🦋|snail snails 🐌
ladybug ladybugs 🐞|turtle turtles 🐢|fish fish 🐠|whale whales 🐳|octopus octopuses 🐙|crab crabs 🦀
elephant elephants 🐘|dinosaur dinosaurs 🦕
sunflower sunflowers 🌻|rose roses 🌹|tree trees 🌳|cactus cacti 🌵|mushroom mushrooms 🍄
apple apples 🍎|banana bananas 🍌|lemon lemons 🍋|watermelon watermelons 🍉|grape grapes 🍇|strawberry strawberries 🍓
pineapple pineapples 🍍|carrot carrots 🥕|broccoli broccoli 🥦|pizza pizzas 🍕|burger burgers 🍔|donut donuts 🍩
cake cakes 🎂|egg eggs 🍳|cup cups ☕|car cars 🚗|bus buses 🚌|truck trucks 🚚|bicycle bicycles 🚲|train trains 🚂
plane planes ✈|rocket rockets 🚀|boat boats ⛵|house houses 🏠|key keys 🔑|umbrella umbrellas ☂|clock clocks ⏰
book books 📕|phone phones 📱|camera cameras 📷|guitar guitars 🎸|drum drums 🥁|ball balls ⚽|balloon balloons 🎈
gift gifts 🎁|hat hats 🎩|shoe shoes 👟|shirt shirts 👕|crown crowns 👑|bell bells 🔔|lamp lamps 💡|hammer hammers 🔨
moon moons 🌙|snowman snowmen ⛄|robot robots 🤖|ghost ghosts 👻
"""


UNSEEN = """
bear bears 🐻|koala koalas 🐨|tiger tigers 🐯|mouse mice 🐭|chicken chickens 🐔|snake snakes 🐍|dolphin dolphins 🐬
cherry cherries 🍒|peach peaches 🍑|kiwi kiwis 🥝|corn corn 🌽|avocado avocados 🥑|cheese cheeses 🧀|hotdog hotdogs 🌭
popcorn popcorn 🍿|trumpet trumpets 🎺|violin violins 🎻|kite kites 🪁|scissors scissors ✂|anchor anchors ⚓
helicopter helicopters 🚁|tractor tractors 🚜|backpack backpacks 🎒|glasses glasses 👓
"""


def sticker_table(stickers: str = STICKERS) -> list[tuple[str, str, str]]:
    """Every (name, plural, character), in the order the class ids of training follow."""
    rows = [entry.split() for line in stickers.strip().splitlines() for entry in line.split("|")]
    return [(name, plural, character) for name, plural, character in rows]


def cut(font: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    """The character's picture, cropped to what is drawn and fitted into a transparent square."""
    canvas = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
    ImageDraw.Draw(canvas).text((8, 8), character, font=font, embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        raise ValueError(f"the font draws nothing for {character!r} (U+{ord(character[0]):04X})")
    drawn = canvas.crop(box)
    scale = STICKER_PIXELS / max(drawn.size)
    width, height = (max(1, round(edge * scale)) for edge in drawn.size)
    square = Image.new("RGBA", (STICKER_PIXELS, STICKER_PIXELS), (0, 0, 0, 0))
    square.paste(
        drawn.resize((width, height), Image.Resampling.LANCZOS),
        ((STICKER_PIXELS - width) // 2, (STICKER_PIXELS - height) // 2),
    )
    return square


def main(font_path: str) -> None:
    """Write every sticker and the `index.json` of its folder: `stickers`, and `unseen`."""
    font = ImageFont.truetype(font_path, FONT_PIXELS)
    for folder_name, stickers in {"stickers": STICKERS, "unseen": UNSEEN}.items():
        folder = Path(__file__).with_name(folder_name)
        folder.mkdir(exist_ok=True)
        index = {}
        for name, plural, character in sticker_table(stickers):
            cut(font, character).save(folder / f"{name}.png", optimize=True)
            index[name] = {"file": f"{name}.png", "plural": plural, "character": character}
        (folder / "index.json").write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
