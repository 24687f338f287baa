import pytest

from gapless.engine.memory import GIB, free_memory_bytes, peak_rss_bytes, plan_kv
from gapless.errors import InvalidRequestError

SIZES = {"bytes_per_token": 1024, "block_size": 16, "context_length": 4096, "max_num_seqs": 4}


def machine(tmp_path, available_kib, cgroup, files):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_machine_without_limits(tmp_path):
    assert free_memory_bytes(machine(tmp_path, 1000, "0::/\n", {})) == 1000 * 1024


def test_cgroup_v2_limit_of_an_ancestor(tmp_path):
    files = {
        "a/memory.max": "500000\n",
        "a/memory.current": "300000\n",
        "a/memory.stat": "anon 1\ninactive_file 100000\n",
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "7\n",
    }
    assert free_memory_bytes(machine(tmp_path, 1000, "0::/a/b\n", files)) == 300000


def test_cgroup_v1(tmp_path):
    files = {
        "memory/c/memory.limit_in_bytes": "400000\n",
        "memory/c/memory.usage_in_bytes": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "1\n",
    }
    root = machine(tmp_path, 1000, "5:cpu,cpuacct:/x\n4:memory:/c\n0::/\n", files)
    assert free_memory_bytes(root) == 300000


def test_a_cgroup_that_is_over_its_limit(tmp_path):
    files = {"memory.max": "10\n", "memory.current": "20\n"}
    assert free_memory_bytes(machine(tmp_path, 1000, "0::/\n", files)) == 0


def test_this_machine():
    assert free_memory_bytes() > 0
    assert peak_rss_bytes() > 1 << 20


def test_plenty_of_memory_gives_every_sequence_its_full_length():
    plan = plan_kv(**SIZES, free_bytes=GIB)
    assert (plan.max_model_len, plan.num_blocks) == (4096, 4 * 256)


def test_little_memory_shortens_the_sequences():
    plan = plan_kv(**SIZES, free_bytes=4 << 20)  # half of it holds 2048 tokens
    assert (plan.max_model_len, plan.num_blocks) == (2048, 128)


def test_an_explicit_size_is_kept():
    plan = plan_kv(**SIZES, kv_cache_gib=6 / 1024, free_bytes=0)
    assert (plan.max_model_len, plan.num_blocks) == (4096, 384)


def test_an_explicit_length_must_fit():
    with pytest.raises(InvalidRequestError, match=r"4096 tokens needs 0.00 GiB") as caught:
        plan_kv(**SIZES, max_model_len=4096, free_bytes=4 << 20)
    assert caught.value.param == "max_model_len"
    with pytest.raises(InvalidRequestError, match="kv_cache_gib"):
        plan_kv(**SIZES, max_model_len=4096, kv_cache_gib=0.001)
    with pytest.raises(InvalidRequestError, match="at most 4096"):
        plan_kv(**SIZES, max_model_len=5000, free_bytes=GIB)


def test_no_memory_at_all():
    with pytest.raises(InvalidRequestError):
        plan_kv(**SIZES, free_bytes=0)
