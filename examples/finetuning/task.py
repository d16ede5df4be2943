"""What is minimised: the cross entropy of a classifier."""

from typing import Any

import jax
import jax.numpy as jnp

from bert import BertForClassification
from training.step import Batch, LossOf

COLUMNS = ("loss", "accuracy")


def logits_of(model: BertForClassification, params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
    """fp32 [B, classes]; with dropout if there is a key. All tokens are of one segment."""
    ids, attention_mask = batch["token_ids"], batch["attention_mask"]
    rngs = None if key is None else {"dropout": key}
    variables = {"params": params}
    return model.apply(variables, ids, attention_mask, jnp.zeros_like(ids), deterministic=key is None, rngs=rngs)


def classification_loss(model: BertForClassification) -> LossOf:
    """The cross entropy in fp32, summed with the weights of the batch, and so the share of right answers."""

    def loss_of(params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = logits_of(model, params, batch, key)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["classes"][:, None], axis=1)[:, 0]
        right = (jnp.argmax(logits, axis=1) == batch["classes"]).astype(jnp.float32)
        loss = -jnp.sum(chosen * batch["weights"])
        return loss, {"loss": loss, "accuracy": jnp.sum(right * batch["weights"])}

    return loss_of
