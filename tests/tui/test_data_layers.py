"""Which layer an allocation is of: told by names and by order, and not told where neither says it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browser_cases import TINY, recording
from hypothesis import given
from hypothesis import strategies as st
from memtrace_tui.data.layers import _by_order, layer_of_rows
from memtrace_tui.data.query import parse
from memtrace_tui.data.rows import AllocationTable
from memtrace_tui.provider import BrowsedRecording

RECORDINGS = Path(__file__).parents[1] / "truth" / "recordings"


@given(st.integers(4, 40), st.integers(6, 12), st.lists(st.integers(0, 5), max_size=12), st.integers(0, 9))
def test_the_layers_of_a_pass_are_counted_by_their_calls(layers: int, once: int, again: list[int], before: int) -> None:
    """Six or more call sites once a layer, others several times, others before and after all of them."""
    body = [100 + site for site in range(once)]
    body[1:1] = [200 + site for site in again if again.count(site) < 9]
    pass_ = [*range(before), *body * layers, 50, 51]
    count, told = _by_order(np.array(pass_))
    assert count == layers
    expected = np.repeat(np.arange(layers), len(body))
    found = told[before : before + len(expected)]
    assert (found == expected).all()
    assert (told[:before] == -1).all() and (told[before + len(expected) :] == -1).all()


def test_two_stacks_of_layers_tell_no_order() -> None:
    """An encoder, then a decoder of as many layers: no number would be right for both."""
    encoder, decoder = list(range(100, 110)), list(range(200, 210))
    assert _by_order(np.array(encoder * 6 + decoder * 6))[0] == 0
    assert _by_order(np.array([1, 2, 3] * 20))[0] == 0  # too few call sites to be a layer


@pytest.mark.parametrize(
    ("name", "layers"),
    [(TINY, 4), ("llama2-7b_baseline", 32), ("qwen2-7b_large-vocabulary", 28), ("llama2-7b_recorded-after-load", 32)],
)
def test_models_have_the_layers_they_have(name: str, layers: int) -> None:
    """All layers but the last of a decoder keep the same bytes for the backward pass."""
    provider = recording(name).provider()
    told = layer_of_rows(provider)
    assert int(told.max()) + 1 == layers
    assert (told[AllocationTable(provider).fitting(parse("category:runtime"))] == -1).all()  # workspaces serve all
    rows = provider.live(provider.start.event)
    kept = [
        int(provider.timeline.allocations.requested_bytes[rows][told[rows] == n].sum()) for n in range(1, layers - 1)
    ]
    assert kept[0] > 0 and len(set(kept)) == 1


def test_a_pass_that_began_before_the_recording_tells_nothing() -> None:
    assert (layer_of_rows(recording("llama2-7b_ring-truncated").provider()) == -1).all()


def test_names_of_parameters_tell_their_layer() -> None:
    provider = BrowsedRecording.open(RECORDINGS / "llama_generate_own-recorder.pickle.xz").provider()
    labels = provider.timeline.snapshot.memtrace["labels"]
    table, told = provider.timeline.allocations, layer_of_rows(provider)
    wanted = {label["address"]: int(label["name"].split(".layers.")[1].split(".")[0])
              for label in labels if ".layers." in label["name"]}  # fmt: skip
    live = [row for row in provider.live(provider.count - 1).tolist() if int(table.address[row]) in wanted]
    assert len(live) > 20 and all(told[row] == wanted[int(table.address[row])] for row in live)


def test_the_filter_finds_a_layer() -> None:
    provider = recording(TINY).provider()
    fits = AllocationTable(provider).fitting(parse("layer:2"))
    assert fits.any() and (fits == (layer_of_rows(provider) == 2)).all()
    assert not (fits & AllocationTable(provider).fitting(parse("layer:1"))).any()
