"""Where recordings are found: folders, patterns, and addresses through fsspec."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from support import trace_path

from memtrace.errors import MissingDependencyError, UsageError
from memtrace.ranks.sources import expand, is_remote, local_copy
from memtrace.ranks.summary import Failure, Rank, summarise

SMALL = trace_path("llama2-7b_oom-at-load")


def test_a_folder_is_its_pickles_in_natural_order(tmp_path: Path) -> None:
    for name in ("rank10.pickle.xz", "rank2.pickle.gz", "rank1.pkl", "rank1.info.json", "notes.txt"):
        (tmp_path / name).touch()
    names = [Path(found).name for found in expand([str(tmp_path)])]
    assert names == ["rank1.pkl", "rank2.pickle.gz", "rank10.pickle.xz"]


def test_a_folder_of_json_dumps_or_of_folders(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}").mkdir()
        (tmp_path / f"rank{rank}" / "snapshot.json").touch()
    assert len(expand([str(tmp_path)])) == 2
    assert len(expand([str(tmp_path / "rank0")])) == 1


def test_patterns_files_and_repetitions(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank{rank}.pickle").touch()
    pattern, file = str(tmp_path / "rank[01].pickle"), str(tmp_path / "rank1.pickle")
    assert [Path(p).name for p in expand([file, pattern])] == ["rank1.pickle", "rank0.pickle"]
    assert expand(["absent.pickle"]) == ["absent.pickle"]  # reported when it is read


def test_a_link_that_leads_nowhere_is_reported_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "rank0.pickle.xz").symlink_to(SMALL)
    (tmp_path / "rank1.pickle").symlink_to(tmp_path / "gone")
    found = expand([str(tmp_path)])
    assert [Path(name).name for name in found] == ["rank0.pickle.xz", "rank1.pickle"]
    assert isinstance(summarise(found[1]), Failure)


def test_an_empty_name_is_not_this_folder() -> None:
    with pytest.raises(UsageError, match="empty name"):
        expand([""])


@pytest.mark.parametrize("source", ["", "*.nothing"])
def test_nothing_there(tmp_path: Path, source: str) -> None:
    with pytest.raises(UsageError, match="no snapshots"):
        expand([str(tmp_path / source)])


@pytest.fixture
def bucket() -> str:
    """Three ranks and other files in fsspec's file system in memory."""
    files = fsspec.filesystem("memory")
    for name in ("rank0.pickle.xz", "rank10.pickle.xz", "rank2.pickle.xz"):
        files.pipe_file(f"/bucket/run/{name}", SMALL.read_bytes())
    files.pipe_file("/bucket/run/log.txt", b"hello")
    files.pipe_file("/bucket/run/rank11.pickle", b"\x80\x04 nonsense")
    return "memory://bucket/run"


def test_remote_folders_patterns_and_files(bucket: str) -> None:
    everything = expand([bucket])
    assert [found.rsplit("/", 1)[1] for found in everything] == [
        "rank0.pickle.xz", "rank2.pickle.xz", "rank10.pickle.xz", "rank11.pickle",
    ]  # fmt: skip
    assert all(found.startswith("memory://") for found in everything)
    assert len(expand([f"{bucket}/*.xz"])) == 3
    assert expand([f"{bucket}/rank0.pickle.xz"]) == [f"{bucket}/rank0.pickle.xz"]


def test_remote_files_are_read_and_their_copies_removed(bucket: str) -> None:
    source = f"{bucket}/rank2.pickle.xz"
    with local_copy(source) as path:
        assert Path(path).read_bytes() == SMALL.read_bytes()
    assert not Path(path).exists()
    summary = summarise(source)
    assert isinstance(summary, Rank) and (summary.file, summary.rank, summary.oom) == (source, 2, True)


@pytest.mark.parametrize(("name", "why"), [("rank11.pickle", "pickle"), ("absent.pickle", "no such file")])
def test_a_remote_file_that_fails_is_one_line(bucket: str, name: str, why: str) -> None:
    failure = summarise(f"{bucket}/{name}")
    assert isinstance(failure, Failure)
    assert why in failure.error and "\n" not in failure.error


def test_an_unknown_protocol_and_a_missing_package() -> None:
    with pytest.raises(UsageError, match="nosuchthing"):
        expand(["nosuchthing://bucket/run"])
    with pytest.raises(MissingDependencyError, match="install"):  # its own package is not among the test extra
        expand(["gdrive://folder"])


def test_a_file_that_is_called_like_a_chain_of_file_systems_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's folder must not make memtrace connect to anything."""

    def connect(*_: object, **__: object) -> None:
        raise AssertionError("an address was opened")

    monkeypatch.setattr(fsspec.core, "url_to_fs", connect)
    monkeypatch.chdir(tmp_path)
    Path("s3::x.pickle").write_bytes(b"no snapshot")
    for sources in (["."], ["*.pickle"], ["s3::x.pickle"]):
        (found,) = expand(sources)
        with local_copy(found) as path:
            assert Path(path).read_bytes() == b"no snapshot"
    assert is_remote("s3::gone.pickle") and is_remote("s3://bucket/x.pickle")
