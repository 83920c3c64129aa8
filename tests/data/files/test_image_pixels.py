"""Images: which pixels come out of a file, of which depth and size."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.files.conftest import noise, refused, write

# Pixels of a file


@pytest.mark.parametrize("suffix", ["png", "tif", "tiff", "bmp", "PNG", "TIF"])
def test_gray_and_color_of_lossless_formats_are_read_exactly(one, suffix):
    gray, color = noise(5, 7), noise(5, 7, 3)
    np.testing.assert_array_equal(one(suffix, Image.fromarray(gray).save), gray[None])
    np.testing.assert_array_equal(one(suffix, Image.fromarray(color).save), color.transpose(2, 0, 1))


@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "JPG"])
def test_jpeg_comes_close_to_what_was_written(one, suffix):
    image = Image.fromarray(noise(4, 5, 3)).resize((40, 32), Image.Resampling.BICUBIC)
    pixels = one(suffix, lambda file: image.save(file, quality=95))
    assert np.abs(pixels.transpose(1, 2, 0).astype(float) - np.array(image)).mean() < 5


def test_one_bit_becomes_black_and_white(one):
    bits = noise(5, 7, top=2).astype(bool)
    np.testing.assert_array_equal(one("png", Image.fromarray(bits).save), 255 * bits[None])


def paletted(index: np.ndarray, palette: np.ndarray) -> Image.Image:
    image = Image.frombytes("P", index.shape[::-1], index.tobytes())
    image.putpalette(palette.flatten().tolist())
    return image


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif"])
def test_a_palette_is_looked_up(one, suffix):
    index, palette = noise(5, 7, top=4), noise(4, 3)
    pixels = one(suffix, paletted(index, palette).save)
    np.testing.assert_array_equal(pixels, palette[index].transpose(2, 0, 1))


def test_ink_becomes_light(one):
    inks = noise(5, 7, 4)
    pixels = one("tif", Image.frombytes("CMYK", (7, 5), inks.tobytes()).save)
    light = (255.0 - inks[..., :3]) * (255.0 - inks[..., 3:]) / 255
    assert np.abs(pixels - light.transpose(2, 0, 1)).max() <= 1.5


def test_luma_and_chroma_become_color(one):
    gray = noise(5, 7)
    neutral = np.stack([gray, np.full_like(gray, 128), np.full_like(gray, 128)], axis=2)
    pixels = one("tif", Image.frombytes("YCbCr", (7, 5), neutral.tobytes()).save)
    np.testing.assert_array_equal(pixels, np.stack([gray] * 3))


def test_transparent_color_lies_over_white(one):
    rgba = noise(5, 7, 4)
    alpha = rgba[..., 3:] / 255
    white = rgba[..., :3] * alpha + 255 * (1 - alpha)
    assert np.abs(one("png", Image.fromarray(rgba).save) - white.transpose(2, 0, 1)).max() <= 1


def test_transparent_gray_lies_over_white_and_stays_gray(one):
    shade, alpha = noise(5, 7, 2).transpose(2, 0, 1)
    image = Image.frombytes("LA", (7, 5), np.stack([shade, alpha], axis=2).tobytes())
    white = shade * (alpha / 255) + 255 * (1 - alpha / 255)
    assert np.abs(one("png", image.save) - white[None]).max() <= 1


@pytest.mark.parametrize("transparent", [2, bytes([255, 255, 0, 255])])
def test_a_transparent_entry_of_a_palette_is_white(one, transparent):
    index, palette = noise(5, 7, top=4), noise(4, 3, top=200)
    pixels = one("png", lambda file: paletted(index, palette).save(file, transparency=transparent))
    palette[2] = 255
    np.testing.assert_array_equal(pixels, palette[index].transpose(2, 0, 1))


def test_a_transparent_shade_is_white(one):
    gray, color = noise(5, 7, top=3), noise(5, 7, 3, top=2)
    pixels = one("png", lambda file: Image.fromarray(gray).save(file, transparency=1))
    np.testing.assert_array_equal(pixels, np.where(gray == 1, 255, gray)[None])
    pixels = one("png", lambda file: Image.fromarray(color).save(file, transparency=(1, 0, 1)))
    clear = (color == [1, 0, 1]).all(2, keepdims=True)
    assert clear.any()
    np.testing.assert_array_equal(pixels, np.where(clear, 255, color).transpose(2, 0, 1))


TURNS = {
    1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud,
    5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1), 8: np.rot90,
}  # fmt: skip
"""What EXIF's orientations ask for."""


def orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("value", TURNS)
def test_images_are_turned_upright(one, suffix, value):
    color, deep = noise(5, 7, 3), noise(5, 7, top=65536, dtype=np.uint16)
    pixels = one(suffix, lambda file: Image.fromarray(color).save(file, exif=orientation(value)))
    np.testing.assert_array_equal(pixels, TURNS[value](color).transpose(2, 0, 1))
    pixels = one(suffix, lambda file: Image.fromarray(deep).save(file, exif=orientation(value)))
    np.testing.assert_allclose(pixels[0], TURNS[value](deep) / 65535 * 2 - 1, atol=1e-6)


def test_jpegs_are_turned_upright(one):
    light = np.zeros((16, 32, 3), np.uint8)
    light[:, 16:] = 255
    pixels = one("jpg", lambda file: Image.fromarray(light).save(file, exif=orientation(6)))
    assert pixels.shape == (3, 32, 16)
    assert pixels[:, :15].max() < 20
    assert pixels[:, 17:].min() > 235


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


@pytest.mark.parametrize("order", ["<", ">"])
def test_deep_gray_of_either_byte_order_and_of_32_bits_is_read(one, order):
    deep = noise(5, 7, top=65536, dtype=np.uint16)
    mode = "I;16" if order == "<" else "I;16B"
    swapped = Image.frombytes(mode, (7, 5), deep.astype(f"{order}u2").tobytes())
    for image in (swapped, Image.fromarray(deep.astype(np.int32))):
        np.testing.assert_allclose(one("tif", image.save)[0], deep / 65535 * 2 - 1, atol=1e-6)


def test_floats_from_0_to_1_are_read(one):
    real = np.random.default_rng(0).random((5, 7), dtype=np.float32)
    np.testing.assert_allclose(one("tif", Image.fromarray(real).save)[0], 2 * real - 1, atol=1e-6)


def test_deep_gray_is_resized_before_it_is_scaled(one):
    deep = noise(9, 15, top=65536, dtype=np.uint16)
    pixels = one("png", Image.fromarray(deep).save, image_size=4)
    small = Image.fromarray(deep.astype(np.float32)).resize((4, 4), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(pixels[0], np.array(small) / 65535 * 2 - 1, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.float32([[0, 1.5]]), "has values from 0 to 1.5, not in 0..1"),
        (np.float32([[0, np.nan]]), "has values from nan to nan, not in 0..1"),
        (np.int32([[-1, 5]]), "has values from -1 to 5, not in 0..65535"),
        (np.int32([[0, 65536]]), "has values from 0 to 65536, not in 0..65535"),
    ],
)
def test_deep_values_of_unknown_scale_are_refused(one, values, said):
    assert said in refused(one, "tif", Image.fromarray(values).save)


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
