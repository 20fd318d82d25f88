"""The target model (DeepseekV3 / Kimi K2), with a cache of latents and any visibility among the new tokens."""
import numpy as np

from . import attention, layers, numbers


class Cache:
  """Per layer: latent [m, kv_lora] normed, k_pe [m, rope] rotated."""

  def __init__(self, n_layers=0):
    self.layers = [None] * n_layers

  def __len__(self):
    return 0 if self.layers[0] is None else len(self.layers[0][0])

  def extended(self, layer, latent, k_pe):
    if self.layers[layer] is None:
      return latent, k_pe
    old_latent, old_k_pe = self.layers[layer]
    return np.concatenate((old_latent, latent)), np.concatenate((old_k_pe, k_pe))

  def keep(self, rows):
    """Only the entries at the indices `rows`, in that order."""
    self.layers = [(latent[rows], k_pe[rows]) for latent, k_pe in self.layers]


class Target:
  def __init__(self, directory, dtype=np.float64):
    self.config, tensors = numbers.read_checkpoint(directory)
    self.tensors = {name: value.astype(dtype) for name, value in tensors.items()}
    c = self.config
    scaling = c.get("rope_scaling")
    table = layers.rope_table(c["max_position_embeddings"], c["qk_rope_head_dim"], c["rope_theta"], scaling)
    self.cos, self.sin = (t.astype(dtype) for t in table)
    self.scale = (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) ** -0.5
    if scaling and scaling.get("mscale_all_dim"):
      self.scale *= layers.yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2

  def cache(self):
    return Cache(self.config["num_hidden_layers"])

  def weight(self, layer, name):
    return self.tensors[f"model.layers.{layer}.{name}.weight"]

  def attention(self, layer, x, positions, visible, cache, absorbed):
    c = self.config
    heads, nope, rope, lora = (c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim",
                                              "kv_lora_rank"))
    cos, sin = self.cos[positions], self.sin[positions]
    w = lambda name: self.weight(layer, "self_attn." + name)
    q = layers.rms_norm(layers.linear(x, w("q_a_proj")), w("q_a_layernorm"), c["rms_norm_eps"])
    q = layers.linear(q, w("q_b_proj")).reshape(len(x), heads, nope + rope)
    q = np.concatenate((q[..., :nope], layers.rotate_interleaved(q[..., nope:], cos[:, None], sin[:, None])), -1)
    kv = layers.linear(x, w("kv_a_proj_with_mqa"))
    latent = layers.rms_norm(kv[:, :lora], w("kv_a_layernorm"), c["rms_norm_eps"])
    latent, k_pe = cache.extended(layer, latent, layers.rotate_interleaved(kv[:, lora:], cos, sin))
    cache.layers[layer] = latent, k_pe
    w_uk, w_uv = attention.split_kv_b(w("kv_b_proj"), heads, nope)
    form = attention.mla_absorbed if absorbed else attention.mla
    return layers.linear(form(q, latent, k_pe, w_uk, w_uv, self.scale, visible), w("o_proj"))

  def feed_forward(self, layer, x):
    """-> ([n, hidden], None or (experts, weights, gap to another set of experts [n]))."""
    c = self.config
    projections = lambda stem: [self.weight(layer, f"{stem}.{p}_proj") for p in ("gate", "up", "down")]
    if layer < c["first_k_dense_replace"]:
      return layers.mlp(x, *projections("mlp")), None
    bias = self.tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
    k = c["num_experts_per_tok"]
    expert, weight, choice = layers.route(x, self.weight(layer, "mlp.gate"), bias, k, c["norm_topk_prob"],
                                          c["routed_scaling_factor"])
    gate, up, down = zip(*(projections(f"mlp.experts.{e}") for e in range(c["n_routed_experts"])))
    best = -np.sort(-choice, -1)
    gap = best[:, k - 1] - best[:, k] if k < choice.shape[1] else np.full(len(x), np.inf)
    return layers.experts(x, expert, weight, gate, up, down, projections("mlp.shared_experts")), (expert, weight, gap)

  def forward(self, ids, positions=None, visible=None, cache=None, absorbed=False, logits_at=slice(None)):
    """ids [n] after `cache`; visible bool [n, n] among the new tokens (default causal), all of the cache is seen.

    -> (logits [n, vocab] at logits_at, hidden: [layers + 1] of [n, hidden] after the embedding and each layer,
    routing: per MoE layer (experts [n, k], weights [n, k], gap [n])). The new tokens are appended to the cache."""
    c = self.config
    cache = cache if cache is not None else self.cache()
    n, past = len(ids), len(cache)
    positions = np.arange(past, past + n) if positions is None else np.asarray(positions)
    visible = np.tril(np.ones((n, n), bool)) if visible is None else visible
    visible = np.concatenate((np.ones((n, past), bool), visible), 1)
    x = self.tensors["model.embed_tokens.weight"][np.asarray(ids)]
    hidden, routing = [x], []
    for i in range(c["num_hidden_layers"]):
      normed = layers.rms_norm(x, self.weight(i, "input_layernorm"), c["rms_norm_eps"])
      x = x + self.attention(i, normed, positions, visible, cache, absorbed)
      out, routed = self.feed_forward(i, layers.rms_norm(x, self.weight(i, "post_attention_layernorm"),
                                                         c["rms_norm_eps"]))
      x = x + out
      hidden.append(x)
      if routed:
        routing.append(routed)
    return self.logits(x[logits_at]), hidden, routing

  def logits(self, x):
    x = layers.rms_norm(x, self.tensors["model.norm.weight"], self.config["rms_norm_eps"])
    return layers.linear(x, self.tensors["lm_head.weight"])

  def embed(self, ids):
    return self.tensors["model.embed_tokens.weight"][np.asarray(ids)]

  def unembed(self, x):
    return layers.linear(x, self.tensors["lm_head.weight"])
