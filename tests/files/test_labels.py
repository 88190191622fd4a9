"""The rule for labels: which texts are the same label, which are none, and what is said about them."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmlkit.files.labels import label_notes, label_of, path_label, stated_label
from tests.conftest import refuses

texts = st.text(st.sampled_from("aA \t\xa0e\u0301\xe9.0-37unkowU"), max_size=9) | st.text(max_size=5)


@given(texts)
def test_a_label_is_its_own_label_and_differs_from_its_text_at_the_ends_in_composition_and_decimals(text: str):
    label = label_of(text)
    assert label_of(label) == label and label_of(f" {text}\n") == label
    assert label_of(unicodedata.normalize("NFD", text)) == label
    plain = unicodedata.normalize("NFC", text).strip()
    if label is None:
        assert plain.lower() in ("", "unknown")
    elif label != plain:
        assert int(label) == float(plain) and plain.startswith(f"{label}.")


@given(st.lists(st.sampled_from("abcdefgh"), max_size=30))
def test_spelled_labels_are_counted(labels: list[str]):
    counts = {f"{label} ": labels.count(label) for label in set(labels)}
    (note,) = label_notes(counts, "t.csv") or [""]
    assert note.startswith(f"t.csv: {len(labels)} image" if labels else "")
    assert note.endswith(f"and {len(counts) - 5} more") == (len(counts) > 5)


def test_what_other_programs_write_for_an_empty_cell_is_a_class_and_is_named():
    """NA is what R writes."""
    counts = {"fox": 3, "NA": 2, "na ": 1, "None": 1, "NAN": 4, "nanny": 1}
    notes = [note for note in label_notes(counts, "t.csv") if "read as classes" in note]
    assert notes == [
        "t.csv: read as classes: 'NA' (2), 'na' (1), 'NAN' (4), 'None' (1); write 'unknown' for images without a label"
    ]
    assert all(label_of(text) == text.strip() for text in counts)


def test_a_folder_without_any_label_gets_no_note():
    assert label_notes({"": 9, "unknown": 2}, "photos") == []


@pytest.mark.parametrize("text", ["", " ", "UNKNOWN ", "\udcff"])
def test_what_a_person_states_must_be_a_label(text: str):
    refuses(r"--label: .* is no label; expected UTF-8 text other than 'unknown'", stated_label, text, "--label")
    assert stated_label(" c01 ", "--label") == "c01" and path_label(["a", text]) in (None, "a/\udcff")
