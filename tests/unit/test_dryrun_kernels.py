"""What CUDA's kernels allocate beside their results: sizes in the order in which an H200's recordings have them."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")
if sys.platform != "linux":
    pytest.skip("the dry device needs Linux", allow_module_level=True)

from forked import Runs, between_marks

MARK = 7777
SCRIPT = f"""
import torch
import torch.nn.functional as F

def mark():
    torch.empty({MARK}, dtype=torch.uint8, device="cuda")

table = torch.ones(20000, 64, device="cuda", requires_grad=True)
rows = torch.randint(0, 20000, (4096,)).cuda()
grad = torch.ones(4096, 64, device="cuda")
y = F.embedding(rows, table)
mark()
torch.autograd.grad(y, table, grad)
mark()
y = F.embedding_bag(rows, table, torch.arange(0, 4096, 8, device="cuda").add_(0), mode="mean")
grad = torch.ones(512, 64, device="cuda")
mark()
torch.autograd.grad(y, table, grad)
mark()
x = torch.ones(48, 120, 384, device="cuda", requires_grad=True)
chosen = (torch.arange(5760) < 1156).view(48, 120).cuda()
mark()
y = x[chosen]
mark()
grad = torch.ones_like(y)
mark()
torch.autograd.grad(y, x, grad)
mark()
x = torch.ones(32, 64, 64, 64, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
weight, bias = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
mark()
F.batch_norm(x, None, None, weight, bias, training=True)
mark()
F.group_norm(x.contiguous(), 8, weight.bfloat16(), bias.bfloat16())
mark()
F.binary_cross_entropy_with_logits(grad, grad)
mark()
torch.linalg.cholesky(torch.ones(8, 8, device="cuda"))
x.cummax(0)
mark()
letters = torch.ones(50, 4, 20, device="cuda", requires_grad=True)
targets, lengths = torch.ones(4, 9, dtype=torch.long), torch.tensor([50, 50, 50, 40])
losses = F.ctc_loss(letters, targets.cuda(), lengths, torch.tensor([3, 9, 7, 1]), reduction="none")
mark()
losses.backward(torch.ones_like(losses))
mark()
kinds = torch.arange(3691, device="cuda") % 7
turned = torch.ones(64, 32, device="cuda").t()
mark()
found = torch.unique(kinds)
assert found.tolist() == list(range(7))
mark()
torch.arange(1000.0, device="cuda").cumprod(0)
mark()
F.layer_norm(turned, (64,))
mark()
unknown = torch.empty(100, device="cuda")
assert len(torch.unique_consecutive(unknown)) == 100 * len(torch.unique_consecutive(torch.ones(9).cuda()))
bool(torch.view_as_complex(unknown.view(50, 2)).sum() == 1j)
held = unknown.sum() > 1000
assert not held and not held.clone()
held.logical_not_()
assert held  # written since: a condition is true
held.copy_(unknown.sum() > 1000)
assert not held
for made in (unknown > 0, unknown[:0]):
    found, places, counts = made.unique(return_inverse=True, return_counts=True)
    assert len(found) == len(counts) == min(len(made), 2) and places.shape == made.shape
    assert torch.unique_consecutive(made[:0], return_counts=True)[1].shape == (0,)
mark()
chances = torch.ones(8, 512, device="cuda")
mark()
loss = F.binary_cross_entropy(chances, chances)
assert loss.shape == () and loss.untyped_storage().nbytes() == 16384
mark()
norms = torch._foreach_norm([chances, torch.ones(1 << 17, device="cuda")])
mark()
x = torch.ones(4, 64, 8, 8, device="cuda", requires_grad=True)
y, grad = F.group_norm(x, 8), torch.ones(4, 64, 8, 8, device="cuda")
mark()
torch.autograd.grad(y, x, grad)
mark()
y, grad = x.softmax(1), grad.to(memory_format=torch.channels_last)
mark()
torch.autograd.grad(y, x, grad)
mark()
x = torch.ones(2, 4, 100, 64, device="cuda", dtype=torch.bfloat16)
mark()
F.scaled_dot_product_attention(x, x, x)
mark()
import bitsandbytes
weight, code = torch.ones(256, 128, device="cuda", dtype=torch.bfloat16), torch.ones(256, device="cuda")
mark()
four, _ = torch.ops.bitsandbytes.quantize_4bit(weight, 64, "nf4", torch.bfloat16)
assert four.shape == (256 * 128 // 4, 1)
mark()
torch.ops.bitsandbytes.quantize_blockwise(weight, code, 256)
mark()
"""
SORTED = [32768, 32768, 32768, 83455]
SUMMED = [5120000, 32768, 8, 32768, 1279, 32768, 32768, 1279, 8, 36040, 1153280]
NONZERO = [4, 21503, 18496, 1023]  # places of 1,156 in two dimensions


@pytest.fixture(scope="module")
def sizes(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What was allocated between two marks."""
    folder = tmp_path_factory.mktemp("runs")
    script, out = folder / "train.py", folder / "run.pickle"
    script.write_text(SCRIPT)
    done = runs("-o", str(out), str(script))
    assert done.returncode == 0, done.stderr[-2000:]
    return between_marks(out, MARK)


def test_many_rows_of_an_embedding_are_sorted_and_summed_by_tens(sizes: list[list[int]]) -> None:
    assert sizes[1] == sizes[3] == SORTED + SUMMED


def test_a_mask_is_counted_and_its_places_selected_and_added_back_in_their_order(sizes: list[list[int]]) -> None:
    assert sizes[5] == [*NONZERO, 1156 * 384 * 4]
    wrapped, place = 4, 1156 * 8
    assert sizes[7] == [48 * 120 * 384 * 4, *NONZERO, *[place] * wrapped, *[place] * 3, 1]


def test_norms_share_channels_among_blocks(sizes: list[list[int]]) -> None:
    images = 32 * 64 * 64 * 64 * 2
    assert sizes[9][:5] == [images, 256, 256, 131072, 8]
    assert sizes[10][-2:] == [32 * 64 * 4] * 2


def test_log_sigmoid_keeps_no_buffer(sizes: list[list[int]]) -> None:
    whole = 1156 * 384 * 4
    assert sizes[11].count(whole) <= 3


def test_ctc_holds_paths_to_the_longest_target_and_a_second_set_on_the_way_back(sizes: list[list[int]]) -> None:
    paths = 4 * 50 * (2 * 9 + 1) * 4
    assert sizes[13].count(paths) == 1 and sizes[14].count(paths) == 1


def test_distinct_values_are_sorted_and_keep_the_room_of_all(sizes: list[list[int]]) -> None:
    assert sizes[16][:5] == [29528, 47615, 29528, 8, 1023]  # as an H200's recording has it


def test_a_row_is_scanned_and_what_is_not_in_order_is_copied_before_it_is_normed(sizes: list[list[int]]) -> None:
    assert sizes[17] == [4000, 4000, 1023]
    assert sizes[18][:2] == [8192, 8192]


def test_distinct_values_that_nobody_knows_are_as_many_as_there_may_be(sizes: list[list[int]]) -> None:
    assert len(sizes) > 20  # the script went on


def test_a_summed_loss_keeps_the_room_of_all_and_norms_a_number_for_each_part(sizes: list[list[int]]) -> None:
    assert sizes[21] == [16384, 4]
    assert sizes[22] == [1 << 19, 2 * 2 * 4, 4, 4]


def test_gradients_of_group_norms_and_of_softmaxes_in_another_layout(sizes: list[list[int]]) -> None:
    whole, by_channel, by_group = 4 * 64 * 64 * 4, 4 * 64 * 4, 4 * 8 * 4
    assert sizes[24] == [whole, by_channel, by_channel, by_group, by_group]
    assert sizes[26] == [whole] * 3


def test_attention_without_a_gradient_keeps_no_sums(sizes: list[list[int]]) -> None:
    assert sizes[28] == [8, 8, 2 * 4 * 100 * 64 * 2, 256]


def test_scales_are_asked_for_before_what_is_quantised(sizes: list[list[int]]) -> None:
    assert sizes[-3] == [512 * 4, 256 * 128 // 2]
    assert sizes[-2] == [128 * 4, 256 * 128]
