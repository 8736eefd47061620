"""Tiny random models of the families that replayssm.transformers covers."""

import torch
import transformers

COMMON = dict(vocab_size=97, hidden_size=32, num_hidden_layers=3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
TYPES = ["linear_attention", "full_attention", "linear_attention"]

# class of the model, class of its config, and the config; layers that keep a state
FAMILIES = {
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        dict(COMMON, num_heads=4, head_dim=16, state_size=8, n_groups=2, expand=2, chunk_size=16),
        [0, 1, 2],
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        dict(
            COMMON,
            **ATTENTION,
            head_dim=8,
            layers_block_type=["mamba", "attention", "mamba"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=16,
        ),
        [0, 2],
    ),
    "bamba": (
        "BambaForCausalLM",
        "BambaConfig",
        dict(
            COMMON,
            **ATTENTION,
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_n_groups=2,
            mamba_chunk_size=16,
        ),
        [0, 2],
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        dict(
            COMMON,
            **ATTENTION,
            head_dim=8,
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_n_groups=2,
            mamba_chunk_size=16,
        ),
        [0, 1, 2],
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        dict(
            COMMON,
            **ATTENTION,
            layer_types=["mamba", "attention", "mamba"],
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_n_groups=2,
            mamba_chunk_size=16,
            num_local_experts=2,
            num_experts_per_tok=1,
            shared_intermediate_size=32,
        ),
        [0, 2],
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        dict(
            COMMON,
            **dict(ATTENTION, num_key_value_heads=4),
            layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_headdim=16,
            n_mamba_heads=4,
            mamba_d_state=8,
            mamba_ngroups=2,
            chunk_size=16,
            num_mem_blocks=1,
            adapter_rank=4,
        ),
        [0, 1, 2],
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        dict(COMMON, **ATTENTION, **DELTA, **EXPERTS, head_dim=8, layer_types=TYPES),
        [0, 2],
    ),
    "qwen3_5": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        dict(COMMON, **ATTENTION, **DELTA, head_dim=8, layer_types=TYPES),
        [0, 2],
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        dict(COMMON, **ATTENTION, **DELTA, **EXPERTS, head_dim=8, layer_types=TYPES),
        [0, 2],
    ),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        dict(COMMON, **ATTENTION, **DELTA, layer_types=TYPES),
        [0, 2],
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        dict(
            COMMON,
            **dict(ATTENTION, num_key_value_heads=4),
            layer_types=TYPES,
            mlp_layer_types=["dense", "sparse", "sparse"],
            linear_num_heads=4,
            linear_head_dim=8,
            linear_conv_kernel_dim=4,
            q_lora_rank=None,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            moe_intermediate_size=16,
            n_group=1,
            topk_group=1,
        ),
        [0, 2],
    ),
}


def tiny(family, dtype=torch.float32, device="cpu"):
    """A model of that family, the same at every call, whose states matter: gates and decays as trained ones have."""
    model_class, config_class, values, _ = FAMILIES[family]
    torch.manual_seed(5)
    config = getattr(transformers, config_class)(**values)
    config._experts_implementation = "eager"  # the others know no float64
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 1)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-4, 0)
            elif parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.to(dtype).to(device)
