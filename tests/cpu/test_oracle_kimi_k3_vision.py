"""The plain forward of the vision tower against values worked out by hand and torch's own operators."""

from __future__ import annotations

import sys

import k3_by_hand as tiny
import pytest
import torch

sys.path.insert(0, str(tiny.ORACLES))  # its process finds the files beside it so
import kimi_k3_vision as vision
from decode import open_checkpoint


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def test_an_image_of_896_pixels_gives_1024_rows_and_keeps_the_table():
    patches, rows, columns = vision.patchify(drawn(1, 3, 896, 896), 14)
    assert (len(patches), rows, columns) == (4096, 64, 64)
    table = drawn(64, 64, 5)
    assert torch.equal(vision.positions(table, 1, 64, 64), table.flatten(0, 1))
    assert len(vision.merge(drawn(64, 64, 5), (2, 2))) == 1024


def test_patches_are_those_of_a_convolution():
    pixels, kernel = drawn(2, 3, 10, 15), drawn(7, 3, 5, 5)
    patches, _, _ = vision.patchify(pixels, 5)
    expected = torch.nn.functional.conv2d(pixels, kernel, stride=5).flatten(2).transpose(1, 2).flatten(0, 1)
    assert torch.allclose(patches @ kernel.flatten(1).T, expected, atol=1e-4)
    with pytest.raises(ValueError, match="15x11 pixels"):
        vision.patchify(drawn(1, 3, 11, 15), 5)


@pytest.mark.parametrize("size", [(7, 3), (2, 9), (4, 6), (1, 1), (11, 13)])
def test_the_table_is_stretched_bilinearly(size):
    table = drawn(4, 6, 5)
    expected = torch.nn.functional.interpolate(
        table.permute(2, 0, 1)[None], size=size, mode="bilinear", align_corners=False, antialias=False
    )
    assert torch.allclose(vision.stretch(table, *size), expected[0].permute(1, 2, 0), atol=1e-6)


def test_frames_carry_a_wave_and_one_frame_none():
    table = drawn(2, 3, 4)
    several = vision.positions(table, 3, 2, 3).reshape(3, 6, 4) - table.flatten(0, 1)
    wave = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.841471, 0.0099998, 0.540302, 0.99995], [0.909297, 0.0199987,
                         -0.416147, 0.9998]])  # fmt: skip
    assert torch.allclose(several, wave[:, None].expand(3, 6, 4), atol=1e-5)


def test_even_pairs_turn_by_column_and_odd_pairs_by_row():
    angle = vision.angles(2, 3, 4, 8).reshape(2, 3, 4, 4)
    assert torch.equal(angle[0], angle[1])
    assert angle[0, 2, 3].tolist() == pytest.approx([3.0, 2.0, 0.03, 0.02])
    turned = vision.turn(torch.tensor([[[1.0, 0.0, 0.0, 1.0]]]), torch.tensor([[torch.pi / 2, torch.pi / 2]]))
    assert torch.allclose(turned, torch.tensor([[[0.0, 1.0, -1.0, 0.0]]]), atol=1e-6)


def test_merging_reads_the_kernel_row_by_row():
    grid = torch.arange(8.0).reshape(2, 4, 1)
    assert vision.merge(grid, (2, 2)).tolist() == [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
    with pytest.raises(ValueError, match="3x4 patches"):
        vision.merge(drawn(3, 4, 1), (2, 2))


def test_images_do_not_see_each_other(tmp_path):
    reader = open_checkpoint(tiny.write(tmp_path, tiny.tensors(), tiny.config()))
    images = [drawn(1, 3, 4, 8), drawn(2, 3, 12, 4)]
    both = vision.image_rows(reader, tiny.config(), images)
    assert torch.equal(both[:2], vision.image_rows(reader, tiny.config(), images[:1]))
    assert both.shape == (2 + 3, tiny.D)
