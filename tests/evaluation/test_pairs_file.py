"""Files of pairs: what is read, and what is no pair."""

from pathlib import Path

import pytest

from dmlkit.errors import UserError
from dmlkit.evaluation.verification import ImagePair, read_pairs


def test_tables_with_and_without_answers(tmp_path: Path):
    path = tmp_path / "pairs.csv"
    path.write_text('b,a,same\n"x, y.png",é.png,1\nz.png,/abs/w.png,Different\n', encoding="utf-8")
    folder = str(tmp_path)
    assert read_pairs([path]) == [
        ImagePair(f"{folder}/é.png", f"{folder}/x, y.png", same=True),
        ImagePair("/abs/w.png", f"{folder}/z.png", same=False),
    ]
    path.write_text("A;B;Same\nc00\\x.png;c01\\y.png;1\n", encoding="utf-16")
    assert read_pairs([path]) == [ImagePair(f"{folder}/c00/x.png", f"{folder}/c01/y.png", same=True)]
    path.write_text("\ufeffa,b\nx.png,y.png\n", encoding="utf-8")
    assert read_pairs([path], Path("photos")) == [ImagePair("photos/x.png", "photos/y.png")]


def test_the_file_of_lfw(tmp_path: Path):
    path = tmp_path / "pairs.txt"
    path.write_text("1\t2\nAbel_Pacheco\t1\t4\nAkhmed_Zakayev\t1\tAlan Greenspan\t12\n")
    assert read_pairs([path], Path("lfw")) == [
        ImagePair("lfw/Abel_Pacheco/Abel_Pacheco_0001.jpg", "lfw/Abel_Pacheco/Abel_Pacheco_0004.jpg", same=True),
        ImagePair(
            "lfw/Akhmed_Zakayev/Akhmed_Zakayev_0001.jpg", "lfw/Alan Greenspan/Alan Greenspan_0012.jpg", same=False
        ),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.tsv", b"", "a .csv or .txt file"),
        ("p.csv", b"a,b\n", "this file has no pairs"),
        ("p.csv", b"a,c\nx,y\n", "got the columns a, c; expected a, b"),
        ("p.csv", b"a,b,same,why\nx,y,1,z\n", "got the columns a, b, same, why; expected a, b"),
        ("p.csv", b"a,a,b\nx,y,z\n", "got the columns a, a, b; expected a, b"),
        ("p.csv", b"a,b\nx\n", "p.csv:2: expected 2 cells, a, b"),
        ("p.csv", b"a,b\nx,\n", "p.csv:2: expected 2 cells, a, b"),
        ("p.csv", b"a,b\nx,y,z\n", "p.csv:2: a row has 3 cells, expected 2 (a, b): 'x,y,z'"),
        ("p.csv", b"a,b,same\nx,y,maybe\n", "p.csv:2: same: got 'maybe', expected 1 or 0"),
        ("p.csv", b"a,b\n\xff\xc3\xb6,y\n", "line 2 is not UTF-8"),
        ("p.csv", b"x.png,y.png\n", "has no header: its first line is 'x.png,y.png'"),
        ("p.txt", b"10 300\n", "this file has no pairs"),
        ("p.txt", b"10 300\nAbel 1\n", "p.txt:2: got 'Abel 1', expected NAME 1 2 or NAME 1 OTHER 3"),
        ("p.txt", b"Abel 1 two\n", "p.txt:1: got 'Abel 1 two', expected NAME 1 2"),
    ],
)
def test_what_is_no_file_of_pairs(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_pairs([tmp_path / name])
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1
