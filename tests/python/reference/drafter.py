"""The DFlash drafter: context keys and values of committed tokens, and one block of mask tokens over them."""
import numpy as np

from . import attention, layers, numbers


class Drafter:
  """From a directory, or from a config dictionary and tensors by name."""

  def __init__(self, directory=None, dtype=np.float64, config=None, tensors=None):
    if directory is not None:
      config, tensors = numbers.read_checkpoint(directory)
    self.config = config
    self.tensors = {name.removeprefix("model."): value.astype(dtype) for name, value in tensors.items()}
    c = config
    table = layers.rope_table(c["max_position_embeddings"], c["head_dim"], c["rope_theta"], c.get("rope_scaling"))
    self.cos, self.sin = (t.astype(dtype) for t in table)
    types = c.get("layer_types", ["full_attention"] * c["num_hidden_layers"])
    self.windows = [c["sliding_window"] if t == "sliding_attention" else 0 for t in types]
    self.taps = c["dflash_config"]["target_layer_ids"]

  def weight(self, layer, name):
    return self.tensors[f"layers.{layer}.{name}.weight"]

  def tapped(self, hidden):
    """The target's [layers + 1] of [n, hidden] -> [n, taps * hidden]: the OUTPUT of each tapped layer."""
    return np.concatenate([hidden[i + 1] for i in self.taps], -1)

  def heads(self, layer, x, name, positions):
    """q or k: [n, hidden] -> projected, normed and rotated [n, heads, head_dim]."""
    y = layers.linear(x, self.weight(layer, f"self_attn.{name}_proj")).reshape(len(x), -1, self.config["head_dim"])
    y = layers.rms_norm(y, self.weight(layer, f"self_attn.{name}_norm"), self.config["rms_norm_eps"])
    return layers.rotate_half(y, self.cos[positions][:, None], self.sin[positions][:, None])

  def values(self, layer, x):
    v = layers.linear(x, self.weight(layer, "self_attn.v_proj"))
    return v.reshape(len(x), -1, self.config["head_dim"])

  def context(self, tapped, positions):
    """tapped [n, taps * hidden] of committed tokens -> per layer (k, v) [n, kv_heads, head_dim]."""
    c = layers.rms_norm(layers.linear(tapped, self.tensors["fc.weight"]), self.tensors["hidden_norm.weight"],
                        self.config["rms_norm_eps"])
    return [(self.heads(i, c, "k", positions), self.values(i, c)) for i in range(self.config["num_hidden_layers"])]

  def block(self, target, root, start, context):
    """Logits [block_size - 1, vocab] of the positions after `root`, which is at `start`; context: positions below."""
    c = self.config
    size = c["block_size"]
    x = target.embed([root] + [c["dflash_config"]["mask_token_id"]] * (size - 1))
    positions = np.arange(start, start + size)
    for i, (k, v) in enumerate(context):
      normed = layers.rms_norm(x, self.weight(i, "input_layernorm"), c["rms_norm_eps"])
      q = self.heads(i, normed, "q", positions)
      k = np.concatenate((k, self.heads(i, normed, "k", positions)))
      v = np.concatenate((v, self.values(i, normed)))
      visible = attention.window_visible(positions, np.arange(start + size), self.windows[i])
      out = attention.grouped_query(q, k, v, visible)
      x = x + layers.linear(out, self.weight(i, "self_attn.o_proj"))
      normed = layers.rms_norm(x, self.weight(i, "post_attention_layernorm"), c["rms_norm_eps"])
      x = x + layers.mlp(normed, *(self.weight(i, f"mlp.{p}_proj") for p in ("gate", "up", "down")))
    return target.unembed(layers.rms_norm(x[1:], self.tensors["norm.weight"], c["rms_norm_eps"]))
