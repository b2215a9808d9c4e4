"""transformers layers that compute attention themselves, rewritten to call weft's attention function.

`weft.swap` gives all such layers of a model these classes. Their masks then come from weft too, as in models that use
transformers' attention interface. ALiBi becomes a position bias.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.mpt.modeling_mpt import MptAttention

from .huggingface import swapped_attention


class WeftBloomAttention(BloomAttention):
    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        out, weights = swapped_attention(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attention_dropout.p,
            scaling=self.inv_norm_factor,
            is_causal=True,
            position_bias=alibi.unflatten(0, (-1, self.num_heads)),
            output_attentions=output_attentions,
        )
        return residual + dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training), weights


class WeftMptAttention(MptAttention):
    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        out, weights = swapped_attention(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attn_dropout_p,
            scaling=self.softmax_scale,
            is_causal=True,
            position_bias=position_bias[None, :, :, -k.shape[2] :],
            output_attentions=output_attentions,
        )
        return self.out_proj(out.flatten(2)), weights


REWRITTEN: dict[type[nn.Module], type[nn.Module]] = {BloomAttention: WeftBloomAttention, MptAttention: WeftMptAttention}
REWRITTEN |= {new: new for new in (WeftBloomAttention, WeftMptAttention)}
