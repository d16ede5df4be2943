"""The parallel BERT: every layout computes what one device does."""

import csv
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_fp16 as fp16
import parallel_bert
from bert import BertConfig, BertForPreTraining
from parallel import run, step
from parallel.checkpoints import Checkpoints
from parallel.gelu import gelu
from parallel.layout import Layout, check, local_entries, specs_of
from parallel.table import LAYOUTS, closeness, run_all
from training.errors import InputError, exit_status
from training.optimizer import decayed

CONFIG = BertConfig(
    vocab_size=32, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=16, max_length=8, dropout=0.0
)
STEPS, BATCH, MASKED = 3, 8, 2


def batch(number):
    rng = np.random.default_rng(number)
    used = rng.integers(0, 2, (BATCH, MASKED)).astype(np.float32)
    return {
        "token_ids": rng.integers(0, 32, (BATCH, 8)).astype(np.int32),
        "attention_mask": (np.arange(8) < rng.integers(4, 9, (BATCH, 1))).astype(np.int32),
        "token_types": rng.integers(0, 2, (BATCH, 8)).astype(np.int32),
        "masked_positions": rng.integers(0, 4, (BATCH, MASKED)).astype(np.int32),
        "masked_labels": rng.integers(0, 32, (BATCH, MASKED)).astype(np.int32),
        "masked_weights": used / max(1, used.sum()),
        "is_next": rng.integers(0, 2, BATCH).astype(np.int32),
        "pair_weights": np.full(BATCH, 1 / BATCH, np.float32),
    }


@pytest.fixture(scope="module")
def alone():
    """(initial parameters, losses, norms, final parameters) of the Flax model on one device."""
    model, rng = BertForPreTraining(CONFIG), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: run.init_params(CONFIG, 0))
    params = jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) / 4).astype(np.float32), shapes)
    tx = fp16.mixed_precision(
        optax.adamw(0.01, eps=1e-6, weight_decay=0.01, mask=decayed),
        max_norm=1.0,
        loss_scale=fp16.static_loss_scale(1.0),
    )

    def loss_of(params, batch):
        inputs = (batch[name] for name in ("token_ids", "attention_mask", "token_types", "masked_positions"))
        words, pairs = model.apply({"params": params}, *inputs)
        word_losses = optax.softmax_cross_entropy_with_integer_labels(words, batch["masked_labels"])
        pair_losses = optax.softmax_cross_entropy_with_integer_labels(pairs, batch["is_next"])
        return jnp.sum(word_losses * batch["masked_weights"]) + jnp.sum(pair_losses * batch["pair_weights"])

    @jax.jit
    def train(params, state, batch):
        loss, grads = fp16.value_and_grad(loss_of, state)(params, batch)
        return *fp16.apply_gradients(tx, grads, state, params), loss

    losses, norms, new, state = [], [], params, tx.init(params)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number in range(STEPS):
            new, state, loss = train(new, state, batch(number))
            losses.append(float(loss))
            norms.append(float(fp16.metrics_of(state)["grad_norm"]))
    return params, losses, norms, new


def trained(layout, params, zero):
    """Three steps, and one in which the gradients of the last data-parallel device are Inf."""
    plan = step.spread(CONFIG, run.mesh_of(layout), 2, params, learning_rate=0.01, zero=zero)
    params = step.put(params, plan.mesh, plan.param_specs)
    state = step.init_state(plan, params)
    train, seen = step.train_step(plan), []
    for number in range(STEPS + 1):
        poison = np.int32(layout.dp - 1 if number == STEPS else -1)
        placed = run.placed(plan, batch(number))
        params, state, metrics = train(params, state, placed, step.put(poison, plan.mesh, P()))
        seen.append({name: float(value) for name, value in metrics.items()})
    return plan, params, state, seen


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "zero"), [(Layout(2, 2, 2), True), (Layout(2, 1, 2), False)])
def test_a_layout_computes_what_one_device_does(layout, zero, alone, loose, tmp_path):
    params, losses, norms, new = alone
    plan, trained_params, state, seen = trained(layout, params, zero)
    np.testing.assert_allclose([each["loss"] for each in seen[:-1]], losses, rtol=1e-5)
    np.testing.assert_allclose([each["grad_norm"] for each in seen[:-1]], norms, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), trained_params, new)
    assert (seen[-1]["skipped_total"], seen[-1]["applied_total"]) == (1, STEPS)
    entries = local_entries(params, plan.param_specs, layout)
    assert run.held(trained_params) == 4 * entries
    share = 8 * entries / (layout.dp if zero else 1)
    assert share <= run.held(state) <= 1.1 * share + 100  # padding tells in a model as small as this
    if layout == Layout(2, 2, 2):
        _goes_on_elsewhere(plan, trained_params, state, tmp_path)


def _goes_on_elsewhere(plan, params, state, folder):
    """What eight devices saved, restored by one that doesn't distribute anything."""
    saved = Checkpoints(folder, {"size": "small"})
    saved.save(3, plan, params, state)
    saved.close()
    one = step.spread(CONFIG, run.mesh_of(Layout(1, 1, 1)), 2, params, learning_rate=0.01, zero=False)
    shapes = jax.eval_shape(lambda: params)
    found = Checkpoints(folder, {"size": "small"})
    restored, restored_state = found.restore(found.latest(), one, shapes)
    found.close()
    whole = plan.tx.whole_state(state, params, plan.mesh)
    jax.tree.map(np.testing.assert_array_equal, (restored, restored_state), (params, whole))
    other = Checkpoints(folder, {"size": "large"})
    with pytest.raises(InputError, match="are of size small and this run is of large; write --size small"):
        other.restore(3, one, shapes)
    other.close()


def test_the_gelu_is_the_exact_one_and_so_is_its_slope():
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    right = np.array([0.5 * float(each) * (1 + math.erf(float(each) / math.sqrt(2))) for each in x])
    density = np.exp(-(x.astype(np.float64) ** 2) / 2) / math.sqrt(2 * math.pi)
    slope = np.array([0.5 * (1 + math.erf(float(each) / math.sqrt(2))) for each in x]) + x * density
    np.testing.assert_allclose(gelu(x), right, atol=2e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(gelu))(x), slope, atol=2e-6)


def test_megatron_s_split_leaves_each_device_its_part():
    params = jax.eval_shape(lambda: run.init_params(BertConfig(**{**vars(CONFIG), "hidden_size": 64}), 0))
    specs = specs_of(params)
    layer = specs["bert"]["layers"]
    assert layer["attention"]["query"]["kernel"] == P("pipe", None, "model")
    assert layer["output"]["kernel"] == P("pipe", "model")
    assert specs["bert"]["embeddings"]["word"] == P("model")
    assert specs["pooler"]["kernel"] == P()
    entries = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert local_entries(params, specs, Layout(4, 1, 1)) == entries
    assert local_entries(params, specs, Layout(1, 2, 2)) < entries / 2


def test_the_table_has_every_layout_with_and_without(tmp_path, capsys):
    ran = []

    def one(layout, zero):
        ran.append((layout, zero))
        memory = run.Memory(*range(1, 7))
        return run.Result(1.5, 6.0 + 1e-5 * len(ran), 6.5, memory)

    run_all(one, tmp_path)
    assert ran == [(layout, zero) for layout in LAYOUTS for zero in (False, True)]
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["DP"], row["TP"], row["PP"]) for row in rows[::2]] == [tuple(map(str, each)) for each in LAYOUTS]
    assert [row["ZeRO"] for row in rows[:2]] == ["no", "yes"]
    assert (tmp_path / "table.md").read_text().count("\n") == 12
    printed = capsys.readouterr().out
    assert "the training losses lie within 1.5e-05 of each other" in printed
    assert str(tmp_path / "table.md") in printed


def test_closeness_is_relative():
    results = [run.Result(1.0, loss, 4.0, run.Memory(*[0] * 6)) for loss in (2.0, 1.0)]
    assert closeness(results).startswith("the training losses lie within 5.0e-01 of each other and the validation")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--devices 2 --dp 4", "needs 4 devices; write --devices 4"),
        ("--table --devices 2", "needs 4 devices"),
        ("--table --processes 2", "--table runs in one process"),
        ("--dp 2 --coordinator localhost:1", "go together"),
        ("--dp 2 --processes 2 --coordinator localhost:1 --process-id 2", "counts from 0 to 1"),
        ("--dp 3 --processes 2", "don't divide 3 devices"),
        ("--dp 2 --devices 4 --processes 2", "write --devices 2"),
        ("--dp zero", "whole number"),
        ("--precision fp8", "invalid choice"),
        ("--no-such-option", "unrecognized arguments"),
    ],
)
def test_a_wrong_command_is_one_line_and_status_two(argv, words, capsys):
    assert exit_status(parallel_bert.main, argv.split()) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("error: ")
    assert words in message


@pytest.mark.parametrize(
    ("layout", "size", "words"),
    [
        (Layout(1, 3, 1), 16, "--tp 3 doesn't divide the model's 2 heads; write one of 1, 2"),
        (Layout(1, 1, 4), 16, "--pp 4 doesn't divide the model's 2 layers; write one of 1, 2"),
        (Layout(4, 1, 1), 14, "write --batch-size 16"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(layout, size, words):
    with pytest.raises(InputError, match=words):
        check(layout, CONFIG, size, 2)


def test_a_layout_larger_than_the_machine_is_refused():
    with pytest.raises(InputError, match=r"needs 16 devices and there are 8 \(.*\); write smaller numbers"):
        run.mesh_of(Layout(16, 1, 1))
