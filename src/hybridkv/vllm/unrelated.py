"""The fields and variables of vLLM that do not change the bytes of its KV cache, and why.

Every other field of `VllmConfig`, at any depth, and every other environment variable of vLLM is a
part of the identity (`hybridkv.vllm.identity`). A field that is new in a version is therefore a
part of it until somebody has put it here: two engines that differ in it share nothing.
tests/engine/fields has the rest of the fields and tries all of them on real engines (requirements
D16).

Each table has a reason first, and then the names that it holds for.
"""

from collections.abc import Mapping

Reasons = Mapping[str, str]
"""Names, separated by spaces, by the reason why they are unrelated."""

WEIGHTS = "How weights come into memory; they are digested there."
LAYOUT = "The groups, the layout and the workers' tensors show it."
DEFAULTS = "It sets defaults of other fields."
DERIVED = "vLLM makes it from other fields."
STEPS = "Which tokens are computed in one step; the engine's own cache mixes them."
MEMORY = "How much there is room for."
TOKENS = "How text becomes tokens; hashes are made from tokens."
LOGITS = "What is done with logits, after the KV cache is written."
REQUESTS = "Which requests are taken and how they travel."
MEDIA = "How media are fetched and kept; their hashes are in the chunk hashes."
LOGS = "What is logged, measured and traced."
PLACES = "Where processes, ports, caches and libraries are."
BUILD = "Read while vLLM is built."
COMPILING = "When and how fast the same kernels are compiled, and where they are kept."
TRANSFER = "What goes to other engines and to listeners."

FIELDS: Mapping[str, Reasons] = {
    "VllmConfig": {
        WEIGHTS: "load_config weight_transfer_config offload_config",
        STEPS: "scheduler_config",
        LAYOUT: "device_config",
        LOGITS: "watermark_config structured_outputs_config aux_output_config reasoning_config",
        LOGS: "observability_config logging_config profiler_config",
        TRANSFER: "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config",
        PLACES: "instance_id shutdown_timeout",
        DEFAULTS: "optimization_level performance_mode",
    },
    "ModelConfig": {
        WEIGHTS: "model model_weights revision seed allow_deprecated_quantization hf_token "
        "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
        "sleep_mode_offload_cudagraph enable_cumem_allocator enable_nccl_comm_suspend",
        "The fact `config` is what came of it.": "hf_config hf_text_config hf_config_path "
        "config_format hf_overrides",
        "The fact `files` is the code that is trusted.": "trust_remote_code code_revision",
        "The compilation_config has what it sets.": "enforce_eager",
        TOKENS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init",
        LOGITS: "max_logprobs logprobs_mode use_fp64_gumbel return_sampling_mask "
        "logits_processors generation_config override_generation_config pooler_config "
        "word_embeddings_untied_by_checkpoint",
        REQUESTS: "served_model_name io_processor_plugin renderer_num_workers "
        "allowed_local_media_path allowed_media_domains enable_prompt_embeds",
        LOGS: "enable_trace_replay",
        "The target's max_model_len is a part of the identity.": "spec_target_max_model_len",
        DERIVED: "is_submodel_config",
    },
    "MultiModalConfig": {
        MEDIA: "limit_per_prompt enable_mm_embeds mm_processor_cache_gb mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_tensor_ipc mm_ipc_gpu_memory_gb "
        "allow_missing_mm_embeddings mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin",
        MEMORY: "skip_mm_profiling",
        TOKENS: "interleave_mm_strings",
    },
    "CacheConfig": {
        LAYOUT: "block_size user_specified_block_size kv_cache_layout sliding_window "
        "mamba_page_size_padded skip_page_size_padded mamba_block_size is_attention_free "
        "effective_attention_block_size hash_block_size cache_hit_alignment_tokens "
        "prefix_match_unit _block_size_resolved",
        MEMORY: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
        "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes",
        "Which blocks the engine's own cache keeps.": "enable_prefix_caching "
        "prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint",
        "The fact `hash` has it.": "prefix_caching_hash_algo",
        TRANSFER: "kv_offloading_size kv_offloading_backend",
    },
    "ParallelConfig": {
        "Each replica is an engine; experts that they share are unread.": "data_parallel_size "
        "data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index "
        "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval "
        "enable_elastic_ep elastic_ep_max_dp_size disable_nccl_for_dp_synchronization "
        "enable_fault_tolerance fault_tolerance_config",
        PLACES: "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port "
        "_data_parallel_master_port_list _coord_store_port master_addr master_port node_rank "
        "distributed_executor_backend ray_workers_use_nsight ray_runtime_env placement_group "
        "numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids rank "
        "_api_process_count _api_process_rank distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds enable_shm_tensor_arena",
        WEIGHTS: "max_parallel_loading_workers worker_extension_cls",
        STEPS: "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold",
        LOGITS: "enable_batch_sharded_sampling",
        DERIVED: "world_size is_moe_model _allow_auto_resolve_cp_interleave_size",
    },
    "KernelConfig": {COMPILING: "enable_cutedsl_warmup enable_jit_warmup"},
    "LoRAConfig": {
        MEMORY: "max_loras max_cpu_loras",
        LOGITS: "max_lora_cls_labels",
        "A request names its adapter, or vLLM does by this.": "default_mm_loras",
    },
    "SpeculativeConfig": {
        DERIVED: "target_model_config target_parallel_config draft_parallel_config",
        WEIGHTS: "draft_load_config",
    },
    "CompilationConfig": {
        COMPILING: "cache_dir local_cache_dir compile_cache_save_format "
        "cudagraph_num_of_warmups fast_moe_cold_start compilation_time "
        "encoder_compilation_time traced_files static_forward_context static_all_moe_layers "
        "enabled_custom_ops disabled_custom_ops",
        LOGS: "debug_dump_path",
        STEPS: "compile_sizes compile_ranges_endpoints cudagraph_mode "
        "cudagraph_capture_sizes max_cudagraph_capture_size "
        "cudagraph_copy_inputs cudagraph_specialize_lora cudagraph_decoder_replay "
        "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold "
        "cudagraph_mm_encoder encoder_cudagraph_token_budgets "
        "encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch",
    },
}
"""By the name of the class."""

VARIABLES: Reasons = {
    WEIGHTS: "VLLM_USE_MODELSCOPE S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL "
    "VLLM_TEST_FORCE_LOAD_FORMAT VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_MODEL_REDIRECT_PATH "
    "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA "
    "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    LAYOUT: "VLLM_KV_CACHE_LAYOUT VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
    "max_model_len is a part of the identity.": "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    MEMORY: "VLLM_CPU_KVCACHE_SPACE VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS "
    "VLLM_ENABLE_STARTUP_PLAN VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE "
    "VLLM_DEEPEP_BUFFER_SIZE_MB",
    "Which processor cores compute.": "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU "
    "VLLM_CPU_CI_ENV",
    TOKENS: "VLLM_USE_FASTOKENS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS "
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE "
    "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT",
    LOGITS: "VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL VLLM_XGRAMMAR_CACHE_MB "
    "VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_V1_USE_OUTLINES_CACHE VLLM_COMPUTE_NANS_IN_LOGITS "
    "VLLM_RAISE_ON_LOGIT_NANS VLLM_ENFORCE_STRICT_TOOL_CALLING "
    "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY",
    REQUESTS: "VLLM_API_KEY VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
    "VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS "
    "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_ENABLE_V1_MULTIPROCESSING "
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_MSGPACK_ZERO_COPY_THRESHOLD "
    "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_DISABLE_REQUEST_ID_RANDOMIZATION "
    "VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH "
    "VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE VLLM_ENABLE_RESPONSES_API_STORE "
    "VLLM_ENABLE_COHERE_API VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_USE_SPINLOOP_EXT "
    "VLLM_MAX_EMBED_DECODE_BYTES",
    MEDIA: "VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT "
    "VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS "
    "VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEDIA_URL_ALLOW_REDIRECTS "
    "VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB "
    "VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES "
    "VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_IMAGE_PIXELS VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    LOGS: "VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE "
    "VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM "
    "VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL "
    "VLLM_TRACE_FUNCTION VLLM_LOG_BATCHSIZE_INTERVAL VLLM_DEBUG_LOG_API_SERVER_RESPONSE "
    "VLLM_PATTERN_MATCH_DEBUG VLLM_DEBUG_DUMP_PATH VLLM_RINGBUFFER_WARNING_INTERVAL "
    "VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_GC_DEBUG "
    "VLLM_DEBUG_WORKSPACE VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_MFU_METRICS VLLM_DISABLE_LOG_LOGO "
    "VLLM_GPU_SYNC_CHECK VLLM_XLA_CHECK_RECOMPILATION VLLM_MOONCAKE_STORE_TIER_LOG",
    PLACES: "VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH "
    "VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_XLA_CACHE_PATH VLLM_NCCL_SO_PATH "
    "LD_LIBRARY_PATH VLLM_CUDART_SO_PATH VLLM_LOOPBACK_IP VLLM_PROCESS_NAME_PREFIX LOCAL_RANK "
    "CUDA_VISIBLE_DEVICES VLLM_NCCL_INCLUDE_PATH VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR "
    "VLLM_HAS_FLASHINFER_CUBIN VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS "
    "VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_CUDA_COMPATIBILITY_PATH VLLM_WORKER_MULTIPROC_METHOD "
    "VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_SKIP_P2P_CHECK VLLM_DISTRIBUTED_USE_SPLIT_GROUP "
    "VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY "
    "VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
    "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_DP_RANK "
    "VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT "
    "VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ELASTIC_EP_DRAIN_REQUESTS "
    "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM "
    "VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_XPU_PP_MICROBATCH VLLM_TPU_USING_PATHWAYS",
    BUILD: "VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION MAX_JOBS NVCC_THREADS VLLM_USE_PRECOMPILED "
    "VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT "
    "VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG CMAKE_BUILD_TYPE VERBOSE "
    "VLLM_SKIP_VERSION_SUFFIX CUDA_HOME",
    COMPILING: "VLLM_DISABLE_COMPILE_CACHE VLLM_USE_AOT_COMPILE VLLM_FORCE_AOT_LOAD "
    "VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_BYTECODE_HOOK VLLM_COMPILE_CACHE_SAVE_FORMAT "
    "VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_DEEP_GEMM_WARMUP VLLM_ENABLE_CUDAGRAPH_GC",
    TRANSFER: "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST "
    "VLLM_P2P_SIDE_CHANNEL_PORT VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S "
    "VLLM_P2P_IDLE_TIMEOUT_S VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT "
    "VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_LOAD_RECV_THREADS "
    "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO MOONCAKE_PREFERRED_SEGMENT "
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT "
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS "
    "VLLM_USE_SIMPLE_KV_OFFLOAD",
}
"""Of the variables that `vllm.envs` knows."""

LIBRARY_VARIABLES = (
    "ATEN_CPU_CAPABILITY CUBLAS_WORKSPACE_CONFIG FLASH_ATTENTION_TRITON_AMD_ENABLE "
    "FLA_COMPILER_MODE FLA_TRIL_PRECISION FLA_USE_FAST_OPS FLA_USE_TMA FORCE_NUM_KV_SPLITS "
    "GDN_RECOMPUTE_SUPPRESS_LEVEL INKLING_GFX950_GLUON INKLING_MULTIMEM_AR INKLING_SPLIT_KV "
    "LAMPORT_RS_SCONV NVIDIA_TF32_OVERRIDE ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_MAX_CPU_ISA "
    "TORCHDYNAMO_DISABLE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_COMPILE_DISABLE TRITON_INTERPRET "
    "USE_DEFAULT_FLA_NORM USE_FLAGOS VLLM_CPU_SIM_MULTI_NUMA XHS_VIDEO_JPEG_QUALITY "
    "XPU_USE_TRITON_KERNEL"
)
"""Variables of libraries, and of vLLM outside `vllm.envs`, that are a part of the identity."""


def names(reasons: Reasons) -> frozenset[str]:
    """Return all names of a table: {"why": "a b", "for that": "c"} -> {"a", "b", "c"}."""
    return frozenset(
        name for names_of_reason in reasons.values() for name in names_of_reason.split()
    )
