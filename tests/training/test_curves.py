from dmlkit.run_folder.documents import EpochRow
from dmlkit.training.summary import plot_curves


def test_curves_read_no_mathematics_and_bear_a_metric_that_an_epoch_lacks_t10(tmp_path):
    validations = [{"$x^": 0.1, r"$\frac$": 0.2}, {"$x^": 0.2}, None]
    rows = [
        EpochRow(epoch=epoch, loss=1.0, lr=0.1, images_per_second=1.0, waiting=0.0, seconds=1.0, validation=metrics)
        for epoch, metrics in enumerate(validations, start=1)
    ]
    plot_curves(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
