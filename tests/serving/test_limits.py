import pytest

from serving.errors import ServeError
from serving.limits import check_limits
from tests.conftest import ROOT
from tests.e2e.serving_helpers import parameter, variant


def test_the_shipped_limits_fit_together():
    check_limits(ROOT / "model_repository", "cpu")


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        (
            "tokenize/config.pbtxt",
            parameter("max_images", "4", "5"),
            "max_images 5, guided, which needs batches of 10, but dit has max_batch_size 8",
        ),
        (
            "vae_decoder/config.pbtxt",
            ("max_batch_size: 4", "max_batch_size: 2"),
            "max_images 4, which needs batches of 4, but vae_decoder has max_batch_size 2",
        ),
        (
            "denoise/config.pbtxt",
            parameter("max_modulation_rows", "32", "64"),
            "max_modulation_rows 64, which needs batches of 64, but modulation",
        ),
        ("dit/config.pbtxt", ("max_batch_size: 8", "max_batch_size: {"), "dit/config.pbtxt cannot"),
    ],
)
def test_limits_that_do_not_fit_are_named(path, change, said, tmp_path):
    changed = variant(ROOT, tmp_path / "copy", {path: [change]}, only="model_repository")
    with pytest.raises(ServeError) as error:
        check_limits(changed / "model_repository", "cpu")
    assert said in str(error.value)
