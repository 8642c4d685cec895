"""The fields and variables of vLLM that `hybridkv.vllm.unrelated` does not have.

FACTS and FACT_VARIABLES are a part of the identity. INSIDE has the fields of configurations that
are unrelated as a whole. What vLLM adds stands in none of the tables, and a test says so.
"""

from collections.abc import Mapping

from hybridkv.vllm.unrelated import (
    DERIVED,
    LAYOUT,
    LOGITS,
    LOGS,
    MEDIA,
    PLACES,
    REQUESTS,
    STEPS,
    TRANSFER,
    WEIGHTS,
    Reasons,
)

FACTS: Mapping[str, str] = {
    "VllmConfig": "model_config cache_config parallel_config attention_config engram_config "
    "mamba_config kernel_config lora_config speculative_config diffusion_config quant_config "
    "compilation_config additional_config",
    "ModelConfig": "runner convert dtype max_model_len quantization quantization_config "
    "disable_sliding_window disable_cascade_attn model_class_overrides model_impl "
    "multimodal_config",
    "QuantizationConfigArgs": "linear moe ignore targets",
    "QuantSpec": "weight activation",
    "QuantKey": "dtype scale scale2 symmetric",
    "ScalarType": "exponent mantissa signed bias _finite_values_only nan_repr",
    "ScaleDesc": "dtype static group_shape",
    "MultiModalConfig": "language_model_only media_io_kwargs mm_processor_kwargs "
    "mm_device_do_normalize mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend "
    "mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method",
    "CacheConfig": "cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype "
    "mamba_ssm_cache_dtype mamba_cache_mode replayssm_buffer_len use_replayssm use_kda_recoverssm "
    "kv_sharing_fast_prefill swa_bounded_replay",
    "ParallelConfig": "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size "
    "enable_hc_sp enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config "
    "expert_placement_strategy all2all_backend disable_custom_all_reduce worker_cls nnodes "
    "decode_context_parallel_size dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate "
    "cp_kv_cache_interleave_size",
    "EPLBConfig": "window_size step_interval num_redundant_experts log_balancedness "
    "log_balancedness_interval use_async policy communicator enable_migration_batching",
    "AttentionConfig": "backend minimax_m3_msa_decode_backend backend_per_kind "
    "flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
    "tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization "
    "mla_prefill_backend use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits "
    "hisparse_config use_non_causal sparse_mla_force_mqa sparse_mla_prefill_workspace_factor "
    "flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size",
    "HiSparseConfig": "device_buffer_size eager_host_mirror",
    "EngramConfig": "cpu_offload embedding_across_dp dp_shared_memory use_thp",
    "MambaConfig": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds "
    "ssu_algorithm",
    "KernelConfig": "ir_op_priority enable_flashinfer_autotune "
    "enable_rocm_segmented_attn_autotune moe_backend sparse_indexer_topk_backend linear_backend "
    "linear_backend_per_quant",
    "IrOpPriorityConfig": "rms_norm fused_add_rms_norm gelu_and_mul_sparse",
    "LoRAConfig": "max_lora_rank fully_sharded_loras lora_dtype target_modules "
    "enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
    "enable_moe_shared_loras",
    "SpeculativeConfig": "enforce_eager num_speculative_tokens model method "
    "draft_model_config draft_tensor_parallel_size tensor_parallel_size quantization moe_backend "
    "attention_backend "
    "kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration "
    "disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction "
    "use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting "
    "num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth "
    "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
    "suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates "
    "synthetic_acceptance_length enable_adaptive_verification draft_sample_method "
    "dspark_draft_topk",
    "DiffusionConfig": "canvas_length max_denoising_steps",
    "CompilationConfig": "mode backend custom_ops ir_enable_torch_wrap splitting_ops "
    "compile_mm_encoder inductor_compile_config inductor_passes use_inductor_graph_partition "
    "pass_config dynamic_shapes_config",
    "PassConfig": "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops "
    "fuse_allreduce_rms enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding "
    "fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache "
    "rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb",
    "DynamicShapesConfig": "type evaluate_guards assume_32_bit_indexing",
}
"""Names by the class, separated by spaces. A name that holds a configuration is one, too."""

INSIDE: Mapping[str, Reasons] = {
    "PoolerConfig": {
        LOGITS: "task pooling_type seq_pooling_type tok_pooling_type use_activation "
        "enable_flash_late_interaction dimensions logit_mean logit_sigma step_tag_id "
        "returned_token_ids",
        REQUESTS: "enable_chunked_processing max_embed_len",
    },
    "FaultToleranceConfig": {PLACES: "engine_recovery_timeout_sec"},
    "SchedulerConfig": {
        STEPS: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive "
        "enable_chunked_prefill max_num_encoder_input_tokens encoder_cache_size policy "
        "disable_chunked_mm_input scheduler_cls scheduler_reserve_full_isl watermark "
        "prefill_schedule_interval async_scheduling stream_interval",
        REQUESTS: "max_num_queued_reqs max_num_queued_tokens",
        LAYOUT: "disable_hybrid_kv_cache_manager",
        DERIVED: "runner_type is_multimodal_model",
    },
    "DeviceConfig": {LAYOUT: "device device_type"},
    "LoadConfig": {
        WEIGHTS: "load_format download_dir safetensors_load_strategy "
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "model_loader_extra_config device ignore_patterns pt_load_map_location",
        LOGS: "use_tqdm_on_load",
    },
    "OffloadConfig": {WEIGHTS: "offload_backend uva prefetch"},
    "UVAOffloadConfig": {WEIGHTS: "cpu_offload_gb cpu_offload_params"},
    "PrefetchOffloadConfig": {
        WEIGHTS: "offload_group_size offload_num_in_group offload_prefetch_step offload_params"
    },
    "AuxOutputConfig": {LOGITS: "enable_return_routed_experts max_bytes"},
    "WatermarkConfig": {
        LOGITS: "key algorithm alpha context_width deduplicate_contexts "
        "deduplicate_contexts_max_history prf allow_target_only_watermarking"
    },
    "StructuredOutputsConfig": {
        LOGITS: "backend disable_any_whitespace disable_additional_properties reasoning_parser "
        "reasoning_parser_plugin enable_in_reasoning"
    },
    "ReasoningConfig": {
        LOGITS: "reasoning_parser reasoning_start_str reasoning_end_str "
        "_reasoning_start_token_ids _reasoning_end_token_ids _natural_reasoning_end_token_ids "
        "_enabled"
    },
    "ObservabilityConfig": {
        LOGS: "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample "
        "custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing "
        "enable_mfu_metrics enable_mm_processor_stats enable_logging_iteration_details "
        "jit_monitor_mode jit_monitor_verbose"
    },
    "LoggingConfig": {LOGS: "log_level formatter configure_logging pylogging_config_file"},
    "ProfilerConfig": {
        LOGS: "profiler torch_profiler_dir torch_profiler_activities proton_profiler_dir "
        "proton_context proton_data proton_backend proton_mode proton_hook proton_output_format "
        "proton_graph_attribution torch_profiler_with_stack torch_profiler_with_flops "
        "torch_profiler_use_gzip torch_profiler_dump_cuda_time_total torch_profiler_record_shapes "
        "torch_profiler_with_memory capture_torch_profiler detailed_trace_annotation "
        "ignore_frontend delay_iterations max_iterations warmup_iterations active_iterations "
        "wait_iterations"
    },
    "KVTransferConfig": {
        TRANSFER: "kv_connector engine_id kv_buffer_device kv_role kv_port "
        "kv_connector_module_path enable_permute_local_kv kv_load_failure_policy",
        "hybridkv's own settings; those that name bytes are facts.": "kv_connector_extra_config",
    },
    "KVEventsConfig": {
        TRANSFER: "enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm "
        "max_queue_size topic"
    },
    "ECTransferConfig": {
        MEDIA: "ec_connector engine_id ec_buffer_device ec_buffer_size ec_role ec_ip ec_port "
        "ec_connector_extra_config ec_connector_module_path mm_encoder_output_widths"
    },
    "EncoderCacheManagerConfig": {MEDIA: "encoder_cache_manager_cls manager_config"},
    "WeightTransferConfig": {WEIGHTS: "backend"},
}
"""Fields of configurations that are no part of the identity, by class."""

FACT_VARIABLES = (
    "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_ALLREDUCE_USE_FLASHINFER "
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_ALLREDUCE_USE_SYMM_MEM "
    "VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_BATCH_INVARIANT VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER "
    "VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_INT4_W4A8 VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE "
    "VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE "
    "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE "
    "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_DEEPEP_V2_PREFER_OVERLAP "
    "VLLM_DISABLED_KERNELS VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_DISABLE_PYNCCL "
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE "
    "VLLM_ENABLE_GEMM_RS VLLM_ENABLE_HPC_OPS VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING "
    "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_ENABLE_PREGRAD_PASSES "
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS "
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLOAT32_MATMUL_PRECISION "
    "VLLM_GDN_DECODE_KERNEL VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_MOE_GEMM_TYPE "
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM "
    "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT "
    "VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM VLLM_MARLIN_INPUT_DTYPE "
    "VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MEDIA_CONNECTOR "
    "VLLM_MLA_DISABLE VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_MOE_SKIP_PADDING "
    "VLLM_MOE_USE_DEEP_GEMM VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD "
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_PLUGINS "
    "VLLM_PP_LAYER_PARTITION VLLM_REPLICATE_EMBED VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS "
    "VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_AITER_MLA_DCP_VERIFY "
    "VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ROCM_FP8_PADDING "
    "VLLM_ROCM_MOE_PADDING VLLM_ROCM_MONO_DECODE VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 "
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB "
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB "
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_CUSTOM_AR "
    "VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_FP8BMM "
    "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR "
    "VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA "
    "VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_MOE_SITUV2 "
    "VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE "
    "VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION "
    "VLLM_ROCM_USE_SKINNY_GEMM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_SSM_CONV_STATE_LAYOUT VLLM_TRITON_FORCE_FIRST_CONFIG "
    "VLLM_TRITON_USE_TD VLLM_TUNED_CONFIG_FOLDER VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_DEEP_GEMM "
    "VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_DIRECT_DCP_A2A "
    "VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_FLASHINFER_MOE_INT4 "
    "VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC VLLM_USE_LAYERNAME "
    "VLLM_USE_NCCL_SYMM_MEM VLLM_USE_OINK_OPS VLLM_USE_STANDALONE_COMPILE VLLM_USE_TRITON_AWQ "
    "VLLM_USE_V2_MODEL_RUNNER VLLM_VIDEO_LOADER_BACKEND VLLM_XLA_USE_SPMD "
    "VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND VLLM_ZENTORCH_WEIGHT_PREPACK"
)
"""Variables of `vllm.envs`: they choose kernels, data types or what a block's bytes mean."""

OTHER_VARIABLES: Reasons = {
    LOGS: "FLA_CI_ENV LLGUIDANCE_LOG_LEVEL OTEL_EXPORTER_OTLP_TRACES_ENDPOINT "
    "PROMETHEUS_MULTIPROC_DIR RAY_USAGE_STATS_ENABLED SAVE_TO_PYTORCH_BENCHMARK_FORMAT TRACEPARENT "
    "TRACESTATE TRITON_PRINT_AUTOTUNING traceparent tracestate",
    PLACES: "CCL_ATL_TRANSPORT CONDA_EXE CONDA_PREFIX CRIU_CUDA_PLUGIN_DIR CUDA_DEVICE_ORDER "
    "CUDA_MODULE_LOADING CUDA_PATH CUDNN_LIBRARY EP_DISABLE_GIN FLASHINFER_CUBINS_REPOSITORY "
    "FLYDSL_RUNTIME_CACHE_DIR GPU_PINNED_MIN_XFER_SIZE HIP_VISIBLE_DEVICES HOST_IP LD_PRELOAD "
    "LOCAL_WORLD_SIZE MORI_SHMEM_HEAP_SIZE NCCL_GRAPH_REGISTER NCCL_MAX_CTAS NCCL_NO_CACHE "
    "OMP_NUM_THREADS OUTLINES_CACHE_DIR PROGRAMFILES PYTORCH_CUDA_ALLOC_CONF ProgramFiles RANK "
    "RAY_CGRAPH_get_timeout ROCM_HOME ROCM_PATH SYSTEMROOT TILELANG_CLEANUP_TEMP_FILES "
    "TORCHINDUCTOR_CACHE_DIR TORCH_CUDA_ARCH_LIST TRITON_CACHE_AUTOTUNING TRITON_CACHE_DIR "
    "UCX_RCACHE_MAX_UNRELEASED UV VLLM_DIST_IDENT VLLM_SNAPSHOT_TIMEOUT_S WINDIR WORLD_SIZE "
    "XDG_CACHE_HOME FLA_USE_CUDA_GRAPH",
    WEIGHTS: "AWS_ENDPOINT_URL HF_XET_HIGH_PERFORMANCE MODELSCOPE_API_TOKEN "
    "RUNAI_STREAMER_S3_ENDPOINT",
    REQUESTS: "EXA_API_KEY OPENAI_API_KEY",
    TRANSFER: "LMCACHE_CONFIG_FILE LMCACHE_FORCE_SKIP_SAVE LMCACHE_USE_UPSTREAM_MP "
    "MOONCAKE_CONFIG_PATH VLLM_MORIIO_TRANSFER_TIMEOUT_S",
    "The fact `hash` has it.": "PYTHONHASHSEED",
}
"""Variables that vLLM's Python reads outside `vllm.envs`, and that are no part of the identity."""
