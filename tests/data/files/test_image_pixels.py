"""Images: which pixels come out of a file, of which depth and size."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.files.conftest import noise, refused, write

# Pixels of a file


def test_of_several_frames_the_first_is_read_and_the_others_are_counted(one, read, root):
    first, others = noise(4, 6), [Image.fromarray(noise(4, 6, key=i)) for i in (1, 2)]

    def save(file):
        Image.fromarray(first).save(file, save_all=True, append_images=others)

    np.testing.assert_array_equal(one("tif", save), first[None])
    np.testing.assert_array_equal(one("png", save), first[None])
    save(root / "gray" / "cat" / "2.tif")
    for _ in range(2):  # decoded, and from the cache
        assert read().notices == ("client 'gray': 1 files hold several frames, the first is read (gray/cat/2.tif: 3)",)


# Gray of more than 8 bits


@pytest.mark.parametrize(
    ("top", "bits"),
    [(1, 8), (255, 8), (256, 10), (1023, 10), (1024, 12), (4095, 12), (4096, 14), (16384, 16), (65535, 16)],
)
def test_deep_gray_is_scaled_by_the_bits_that_its_training_images_use(read, tmp_path, top, bits):
    folder = tmp_path / "deep" / "scan"
    images = {part: noise(4, 6, key=i, top=top, dtype=np.uint16) for i, part in enumerate(("train", "test"))}
    images["train"][1, 2] = top
    images["test"][0, 0] = 65535
    for part, image in images.items():
        write(folder / part / "only" / "a.png", image)
        write(folder / part / "only" / "b.tif", image)
    for _ in range(2):  # decoded, and from the cache
        data = read(tmp_path / "deep")
        said = f"gray of more than 8 bits read as {bits} bits, 0..{2**bits - 1} scaled to [-1, 1], at all clients"
        assert data.notices == (said,)
        for part, image in images.items():
            x = data.clients[0].splits[part].x
            assert x.dtype == torch.float32
            expected = np.minimum(image / (2.0**bits - 1), 1) * 2 - 1
            np.testing.assert_allclose(x.numpy(), np.broadcast_to(expected, (2, 1, 4, 6)), atol=1e-6)


def test_a_larger_test_value_changes_nothing_in_training(read, tmp_path):
    for i in range(10):
        write(tmp_path / "deep" / "scan" / "only" / f"{i}.png", noise(4, 6, key=i, top=4096, dtype=np.uint16))
    before = read(tmp_path / "deep")
    held_out = before.clients[0].test.rows
    assert len(held_out) == 2
    for i in held_out:
        write(tmp_path / "deep" / "scan" / "only" / f"{i}.png", np.full((4, 6), 65535, np.uint16))
    after = read(tmp_path / "deep")
    assert torch.equal(before.clients[0].train.x, after.clients[0].train.x)
    assert (after.clients[0].test.x == 1).all()


def test_deep_gray_is_resized_before_it_is_scaled(one):
    deep = noise(9, 15, top=65536, dtype=np.uint16)
    pixels = one("png", Image.fromarray(deep).save, image_size=4)
    small = Image.fromarray(deep.astype(np.float32)).resize((4, 4), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(pixels[0], np.array(small) / 65535 * 2 - 1, atol=1e-6)


def test_gray_of_8_and_of_16_bits_is_not_mixed_in_a_client(read, root):
    deep = write(root / "gray" / "cat" / "0.png", noise(4, 6, dtype=np.uint16))
    assert refused(read) == (
        f"client 'gray' has images of different depth, {deep.with_name('1.bmp')} (byte) and {deep} (integer): "
        "convert all of a client's images to one"
    )


# Sizes and channels


@pytest.mark.parametrize("channels", [(), (3,)])
def test_a_size_asked_for_is_bilinear_with_antialiasing(one, channels):
    image = noise(9, 15, *channels)
    pixels = one("png", Image.fromarray(image).save, image_size=4)
    whole = torch.from_numpy(image).reshape(1, 9, 15, -1).permute(0, 3, 1, 2).double()
    small = torch.nn.functional.interpolate(whole, size=(4, 4), mode="bilinear", antialias=True, align_corners=False)
    assert pixels.shape == small.shape[1:]
    assert np.abs(pixels - small[0].numpy()).max() <= 1  # Pillow rounds after each direction


def test_sizes_that_differ_are_refused_by_name(read, root):
    small = write(root / "gray" / "cat" / "0.png", noise(3, 5))
    large = write(root / "color" / "dog" / "1.bmp", noise(8, 4, 3))
    said = refused(read)
    assert f"{small} has 5 x 3 pixels, {large} has 4 x 8 (widths 4 to 6, heights 3 to 8)" in said
    assert "image_size=64" in said
    assert {client.train.shape[1:] for client in read(image_size=5).clients} == {(5, 5)}


def test_a_size_that_differs_from_that_of_a_cached_client_is_refused(read, root):
    read(domains=("gray",))
    for file in (root / "color").rglob("*.*"):
        write(file, noise(8, 8, 3))
    said = refused(read)
    assert f"{root / 'gray' / 'cat' / '0.png'} has 6 x 4 pixels, {root / 'color' / 'cat'}" in said


def test_gray_is_repeated_next_to_color_in_a_client(read, root):
    gray = noise(4, 6, key=77)
    write(root / "color" / "cat" / "0.png", gray)
    client = read().client("color")
    x = torch.cat([client.train.x, client.test.x]).numpy()
    assert x.shape == (12, 3, 4, 6)
    assert sum((image == gray).all() for image in x) == 1


def test_an_impossible_size_is_refused(read):
    assert refused(read, image_size=0) == "image_size=0 pixels: must be at least 1"
