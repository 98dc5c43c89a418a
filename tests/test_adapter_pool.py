"""Adapters that share a pool's memory, and adapters merged into the base weight."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest
import torch

import halfbyte
from adapter_samples import K, N, base, make_adapter
from halfbyte import reference
from halfbyte.adapters import Adapter, AdapterPool, AdapterPoolFull, linear_with_adapters, merge_exact, shrink
from halfbyte.formats import quantize
from kernel_samples import random_weight, seeded

# ---- pools


def test_layers_that_share_x_shrink_once():
    generator = seeded(14)
    sizes = {"q": 72, "k": 40, "v": 8}
    weights = {name: base(n=n, seed=n) for name, n in sizes.items()}
    pool = AdapterPool(K, sizes, slots=3, ranks=96, max_rank=40, dtype=torch.float32)
    made = [
        {name: make_adapter(rank, generator, n=sizes[name]) for name, rank in ranks.items()}
        for ranks in ({"q": 16, "k": 3, "v": 40}, {"v": 1, "q": 20}, {"k": 33})
    ]
    assert [pool.add(each) for each in made] == [0, 1, 2]
    x = torch.randn(2, 9, K, generator=generator)
    index = torch.randint(-1, 3, (2, 9), generator=generator)
    h = shrink(x, pool, index)
    assert h.shape == (2, 9, pool.width)
    for name, weight in weights.items():
        out = linear_with_adapters(x, weight, None, pool.layer(name), index, shrunk=h)
        assert torch.equal(out, linear_with_adapters(x, weight, None, pool.layer(name), index))
        listed = [each.get(name, Adapter(torch.zeros(1, K), torch.zeros(sizes[name], 1))) for each in made]
        reference.assert_within_contract(out, reference.linear(x, weight, None, listed, index), name)
        for slot, each in enumerate(made):
            if name not in each:
                mine = index == slot
                assert torch.equal(out[mine], halfbyte.linear(x, weight)[mine])


def test_pool_churn():
    """Hundreds of random changes against a dictionary: same outputs, addresses that stay, full only when full."""
    rng, generator = random.Random(0), seeded(15)
    weight = base()
    pool = AdapterPool(K, N, slots=6, ranks=160, max_rank=64, dtype=torch.float32)
    layer, held = pool.layer(), {}
    tensors = (layer.a, layer.spans, layer.b, layer.table, layer.scalings)
    addresses, size = [tensor.data_ptr() for tensor in tensors], pool.nbytes
    x = torch.randn(12, K, generator=generator)
    seen = {"full": 0, "slots": 0, "put": 0}
    for step in range(300):
        rank = rng.choice([1, 7, 16, 17, 33, 64])
        adapter = make_adapter(rank, generator)
        used = {slot: -(-each.rank // 16) * 16 for slot, each in held.items()}
        action = rng.choice(["add", "add", "replace", "remove", "scale"])
        if action == "add" and len(held) == 6:
            with pytest.raises(AdapterPoolFull, match="all 6 slots are taken"):
                pool.add(adapter)
            seen["slots"] += 1
        elif action in ("add", "replace") and (action == "add" or held):
            slot = rng.choice(sorted(held)) if action == "replace" else None
            free = 160 - sum(count for each, count in used.items() if each != slot)
            if -(-rank // 16) * 16 > free:
                with pytest.raises(AdapterPoolFull, match=rf"ranks are needed, {free} of 160 are free"):
                    pool.add(adapter) if slot is None else pool.replace(slot, adapter)
                seen["full"] += 1
            else:
                if slot is None:
                    slot = pool.add(adapter)
                    assert slot == min(set(range(6)) - set(held))
                else:
                    pool.replace(slot, adapter)
                held[slot] = adapter
                seen["put"] += 1
        elif action == "remove" and held:
            slot = rng.choice(sorted(held))
            pool.remove(slot)
            del held[slot]
            assert slot not in pool
        elif action == "scale" and held:
            slot = rng.choice(sorted(held))
            held[slot] = dataclasses.replace(held[slot], scaling=rng.uniform(-2, 2))
            pool.set_scaling(slot, held[slot].scaling)
        assert len(pool) == len(held)
        if step % 5 == 0:
            index = torch.randint(-1, 6, (12,), generator=generator)
            nothing = Adapter(torch.zeros(1, K), torch.zeros(N, 1))
            listed = [held.get(slot, nothing) for slot in range(6)]
            out = linear_with_adapters(x, weight, None, layer, index)
            y = reference.linear(x, weight, None, listed, index)
            reference.assert_within_contract(out, y, f"step {step}")
    assert min(seen.values()) > 5, seen
    assert addresses == [tensor.data_ptr() for tensor in tensors]
    assert pool.nbytes == size
    assert pool.free_ranks == 160 - sum(-(-each.rank // 16) * 16 for each in held.values())


def test_a_pool_has_the_bits_of_a_list():
    generator = seeded(16)
    weight, listed = base(), [make_adapter(r, generator, torch.bfloat16) for r in (3, 16, 31)]
    pool = AdapterPool(K, N, slots=5, ranks=80, max_rank=32)
    for each in listed:
        pool.add(each)
    x = torch.randn(11, K, generator=generator).bfloat16()
    index = torch.randint(-1, 3, (11,), generator=generator)
    wanted = linear_with_adapters(x, weight, None, listed, index)
    assert torch.equal(linear_with_adapters(x, weight, None, pool, index), wanted)
    assert torch.equal(linear_with_adapters(x, weight, None, pool.layer(), index), wanted)


def test_random_pools():
    pool = AdapterPool.random(K, {"gate": N, "up": N}, [16, 1, 64], seed=3)
    again = AdapterPool.random(K, {"gate": N, "up": N}, [16, 1, 64], seed=3)
    assert len(pool) == pool.slots == 3
    assert pool.free_ranks == 0
    assert torch.equal(pool.a, again.a)
    weight = quantize(torch.randn(N, K, generator=seeded(17)), "nf4-64")
    x = torch.randn(64, K, generator=seeded(18))
    plain = halfbyte.linear(x, weight)
    for slot in range(3):
        out = linear_with_adapters(x, weight, None, pool.layer("up"), torch.full((64,), slot))
        assert 0.01 < reference.relative_error(out, plain.double()) < 0.1


def test_scaling_of_lora_and_rank_stabilised_lora():
    a, b = torch.randn(16, K), torch.randn(N, 16)
    assert Adapter.lora(a, b, 32).scaling == 2
    assert Adapter.lora(a, b, 32, rank_stabilized=True).scaling == 8
    assert Adapter.lora(a, b, 32).rank == 16


def test_a_pool_s_errors():
    generator = seeded(20)
    pool = AdapterPool(K, {"q": N, "v": 40}, slots=2, ranks=32, max_rank=16)
    good = {"q": make_adapter(16, generator, torch.bfloat16), "v": make_adapter(2, generator, torch.bfloat16, 40)}
    with pytest.raises(TypeError, match=r"give \{layer: Adapter\} for the layers q, v"):
        pool.add(good["q"])
    with pytest.raises(ValueError, match=r"layers must be of \['q', 'v'\], got \['k'\]"):
        pool.add({"k": good["q"]})
    with pytest.raises(ValueError, match="the adapter's layer 'v': A must be"):
        pool.add(good | {"v": good["q"]})
    with pytest.raises(ValueError, match="has rank 17, max_rank is 16"):
        pool.add({"q": make_adapter(17, generator, torch.bfloat16)})
    with pytest.raises(TypeError, match=r"torch.float32 and torch.float32, the pool torch.bfloat16; cast it"):
        pool.add({"q": make_adapter(4, generator)})
    for call in (lambda: pool.remove(0), lambda: pool.replace(1, good), lambda: pool.set_scaling(0, 1.0)):
        with pytest.raises(KeyError, match="is empty; taken are none"):
            call()
    assert len(pool) == 0
    pool.add(good)
    with pytest.raises(KeyError, match="no layer 'k'"):
        pool.set_scaling(0, 1.0, "k")
    with pytest.raises(KeyError, match="no layer 'k'; it has 'q', 'v'"):
        pool.layer("k")
    for words, text in (
        ({"in_features": 0, "out_features": 4}, "in_features"),
        ({"in_features": 4, "out_features": {}}, "no layer"),
        ({"in_features": 4, "out_features": 4, "max_rank": 257}, "max_rank must be from 1 to 256"),
    ):
        with pytest.raises(ValueError, match=text):
            AdapterPool(**words)
    with pytest.raises(TypeError, match="dtype must be"):
        AdapterPool(4, 4, dtype=torch.float64)
    wide = AdapterPool(K, N, slots=1, ranks=16, max_rank=16, dtype=torch.float32)
    wide.add(make_adapter(4, generator, torch.float16))  # exact


# ---- merging


def test_merge_exact_against_a_dense_sum():
    generator = seeded(21)
    for key in ("nf4-64", "nf4-64-nested", "q4_0"):
        weight = base(key)
        adapter = make_adapter(8, generator, torch.bfloat16, size=0.05)
        merged, loss = merge_exact(weight, adapter)
        before = weight.dequantize(torch.float64)
        effect = adapter.scaling * adapter.b.double() @ adapter.a.double()
        change = merged.dequantize(torch.float64) - before
        again = quantize((before + effect).float(), key)
        assert all(torch.equal(part, again.parts[name]) for name, part in merged.parts.items())
        assert loss.weight_error == pytest.approx(float((change - effect).norm() / (before + effect).norm()))
        assert loss.effect_error == pytest.approx(float((change - effect).norm() / effect.norm()))
        assert loss.effect_kept == pytest.approx(float((change * effect).sum() / effect.square().sum()))
        assert 0.02 < loss.weight_error < 0.2


def test_what_merging_loses_and_running_unmerged_does_not():
    """A small adapter: re-quantised, the error is as large as what it does; unmerged it is exact."""
    generator = seeded(22)
    weight = base("nf4-64", 256, 256)
    adapter = Adapter(torch.randn(8, 256, generator=generator) / 16, torch.randn(256, 8, generator=generator) * 0.1)
    merged, loss = merge_exact(weight, adapter)
    assert loss.effect_error > 0.5
    x = torch.randn(16, 256, generator=generator)
    y = reference.linear(x, weight, None, [adapter])
    effect = (y - reference.linear(x, weight)).norm()
    assert (linear_with_adapters(x, weight, None, adapter).double() - y).norm() < 1e-4 * effect
    assert (halfbyte.linear(x, merged).double() - y).norm() > 0.3 * effect


def test_merging_nothing_and_what_cannot_be_written():
    generator = seeded(23)
    weight = base()
    nothing = Adapter(torch.randn(4, K, generator=generator), torch.zeros(N, 4))
    merged, loss = merge_exact(weight, nothing)
    assert torch.equal(merged.codes, weight.codes)
    assert loss.weight_error < 1e-6
    assert loss.effect_error != loss.effect_error  # there is no effect to compare with
    with pytest.raises(ValueError, match="no quantiser for 'gptq-32'"):
        merge_exact(random_weight("gptq-32", N, K, generator), nothing)
    with pytest.raises(ValueError, match="A must be"):
        merge_exact(base(n=8), nothing)


def test_what_the_docs_show_runs():
    text = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text()
    examples = [each for each in re.findall(r"```python\n(.*?)```", text, re.S) if "PeftModel" not in each]
    assert len(examples) == 3
    for example in examples:
        exec(example, {})
