"""Paper twins: the full table of a release in headers over sparse files, without torch."""

import json
from pathlib import Path

import pytest

from dayzero.checkpoint.index import read_index
from dayzero.checkpoint.source import open_source
from dayzero.checkpoint.write import ShardTensor, header_bytes, split_shards
from dayzero.errors import ModelError, UsageError
from dayzero.planner.inspect import inspect_source
from dayzero.rehearse import twin as twin_module
from dayzero.rehearse.shrink import lost_traits, shrink
from dayzero.rehearse.twin import MARK, TwinOptions, write_twin

CONFIGS = Path(__file__).parent / "configs"


def config(tmp_path: Path, name: str) -> str:
    (tmp_path / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    return str(tmp_path / "config.json")


def test_paper_twin_has_the_full_size_and_takes_no_space(tmp_path: Path) -> None:
    out = tmp_path / "paper"
    made = write_twin(config(tmp_path, "qwen3_8b"), str(out), TwinOptions(paper=True, num_shards=5))
    assert made.num_shards == 5 and made.parameters == 8_190_735_360 and made.total_bytes == 2 * made.parameters
    on_disk = sum(f.stat().st_blocks * 512 for f in out.iterdir())
    assert on_disk < made.total_bytes // 100  # headers, and what the file system rounds up
    index = read_index(open_source(str(out)))
    assert index.problems == [] or all(p.verdict != "fail" for p in index.problems)
    assert len(index.entries) == made.num_tensors and index.total_bytes == made.total_bytes
    assert json.loads((out / MARK).read_text())["paper"] is True


def test_a_twin_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        write_twin(config(tmp_path, "qwen3_8b"), str(tmp_path / "there"), TwinOptions(paper=True))


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dayzero.rehearse.twin.write_sparse_shard", full)
    with pytest.raises(OSError):
        write_twin(config(tmp_path, "qwen3_8b"), str(tmp_path / "out"), TwinOptions(paper=True))
    assert {f.name for f in tmp_path.iterdir()} == {"config.json"}


def test_an_unknown_family_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodyForCausalLM"], "hidden_size": 8}))
    with pytest.raises(ModelError, match="nearest known family"):
        write_twin(str(tmp_path / "config.json"), str(tmp_path / "out"))


def test_a_twin_that_would_lose_a_trait_is_refused(tmp_path: Path) -> None:
    # A window that no layer uses any more is a trait lost.
    with pytest.raises(UsageError, match="--set layer_types, num_hidden_layers: a twin of this size loses"):
        write_twin(
            config(tmp_path, "gpt_oss_20b"), str(tmp_path / "out"),
            TwinOptions(changes={"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4}),
        )  # fmt: skip


def test_changes_must_name_keys_that_exist() -> None:
    with pytest.raises(UsageError, match="--set no_such_key"):
        shrink({"hidden_size": 8}, {"hidden_size": 4}, keep_vocab=False, changes={"no_such_key": 1})


def test_lost_traits_of_a_model_against_itself_are_none(tmp_path: Path) -> None:
    from dayzero.models.blueprint import blueprint, require_recipe

    data = json.loads((CONFIGS / "kimi_k3_1.json").read_text())
    spec = blueprint(data, require_recipe(data)).spec
    assert lost_traits(spec, spec) == []


def test_headers_are_aligned_and_shards_are_never_empty() -> None:
    tensors = [ShardTensor(f"t{i}", "BF16", (i + 1, 3)) for i in range(7)]
    head = header_bytes(tensors)
    assert len(head) % 8 == 0 and int.from_bytes(head[:8], "little") == len(head) - 8
    one_huge = [ShardTensor("a", "F32", (1000,)), ShardTensor("b", "F32", (1,)), ShardTensor("c", "F32", (1,))]
    shards = split_shards(one_huge, 3, sum(t.num_bytes for t in one_huge))
    assert [len(s) for s in shards] == [1, 1, 1] or all(shards)
    assert [t.name for s in shards for t in s] == ["a", "b", "c"]


def test_a_run_beside_another_keeps_to_its_own_files(tmp_path: Path) -> None:
    """A second run once removed what the first was writing, and whatever else had the name of its temporary folder."""
    source = config(tmp_path, "qwen3_8b")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").write_text("keep")
    write_twin(source, str(tmp_path / "out"), TwinOptions(paper=True))
    assert (tmp_path / "out.partial" / "mine.txt").read_text() == "keep"
    assert {f.name for f in tmp_path.iterdir()} == {"config.json", "out", "out.partial"}


def test_of_two_runs_to_one_place_the_second_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began before the first was done: nothing of the first is replaced."""
    source, out = config(tmp_path, "qwen3_8b"), tmp_path / "out"
    write = twin_module.write_sparse_shard

    def slow(*arguments: object) -> None:
        out.mkdir(exist_ok=True)
        (out / "first.txt").write_text("first")
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(twin_module, "write_sparse_shard", slow)
    with pytest.raises(UsageError, match="exists already"):
        write_twin(source, str(out), TwinOptions(paper=True))
    assert {f.name for f in tmp_path.iterdir()} == {"config.json", "out"}
    assert [f.name for f in out.iterdir()] == ["first.txt"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 100_000_000}, "no model has more than"),
        ({"vocab_size": float("inf")}, "JSON cannot hold"),
        ({"rms_norm_eps": float("nan")}, "JSON cannot hold"),
        ({"num_attention_heads": 3}, "cannot share"),
        ({"hidden_size": 100}, "cannot hold these tensors: .* multiple of 32"),
        ({"hidden_size": 1 << 60}, "larger than any size"),
    ],
)
def test_changes_are_held_to_what_a_config_may_say(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    for paper in (True, False):
        with pytest.raises(UsageError, match=f"^--set {next(iter(changes))}: .*{said}"):
            write_twin(
                config(tmp_path, "gpt_oss_20b"), str(tmp_path / "out"), TwinOptions(paper=paper, changes=changes)
            )
    assert {f.name for f in tmp_path.iterdir()} == {"config.json"}


def test_a_shape_that_its_format_cannot_hold_is_found_on_paper(tmp_path: Path) -> None:
    path = Path(config(tmp_path, "gpt_oss_20b"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 2900}))
    found = [f for f in inspect_source(str(path)).findings if f.kind == "quantization.shape"]
    assert [f.verdict for f in found] == ["fail"] and "multiple of 32, not 2900" in found[0].evidence[0]
