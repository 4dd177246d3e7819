"""Every state has a tone, an icon and a word, and every text can be read in both themes."""

from __future__ import annotations

import re
from itertools import product

import pytest

from interlock.dashboard.render import read_static
from interlock.dashboard.states import STYLES, TONES, state_word
from interlock.lifecycle import MACHINES

pytestmark = pytest.mark.unit
CSS = read_static("dash.css").decode()
MIN_TEXT_CONTRAST = 4.5
MIN_SHAPE_CONTRAST = 3.0


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_has_tone_icon_word(name: str) -> None:
    icons = set(re.findall(r'<symbol id="([\w-]+)"', read_static("icons.svg").decode()))
    styles = STYLES[name]
    assert set(styles) == {str(state) for state in MACHINES[name].states}
    assert {style.tone for style in styles.values()} <= set(TONES)
    assert {style.icon for style in styles.values()} <= icons
    assert len({style.icon for style in styles.values()}) == len(styles), "an icon repeats within one lifecycle"
    assert all(state_word(state) for state in styles)


def _colour(name: str, theme: str) -> str:
    found = re.search(rf"--{name}:light-dark\((#\w+),(#\w+)\)", CSS)
    assert found is not None, name
    return found[1] if theme == "light" else found[2]


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(first: str, second: str) -> float:
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_aa_in_both_themes(theme: str) -> None:
    texts = [("ink", "bg"), ("accent", "accent-soft"), ("accent-ink", "accent")]
    texts += product(("ink", "ink-2", "ink-3"), ("surface", "sunken"))
    texts += [(tone, f"{tone}-soft") for tone in TONES] + [(tone, "surface") for tone in TONES]
    shapes = [(f"{tone}-fill", "surface") for tone in TONES]
    for pairs, least in ((texts, MIN_TEXT_CONTRAST), (shapes, MIN_SHAPE_CONTRAST)):
        for over, under in pairs:
            assert _contrast(_colour(over, theme), _colour(under, theme)) >= least, (over, under)
