"""What the engines of `test_fields` change, and why the rest of the fields is not tried.

Every field and variable that is said to be unrelated to KV stands in one of these tables.
`{directory}` is an empty directory, `{model}` a copy of the model's directory.
"""

from collections.abc import Mapping

from hybridkv.vllm.unrelated import Reasons

ARGUMENTS: Mapping[str, str] = {
    "ModelConfig.model": "--model={model}",
    "ModelConfig.revision": "--revision=some",
    "ModelConfig.seed": "--seed=7",
    "ModelConfig.allow_deprecated_quantization": "--allow-deprecated-quantization",
    "ModelConfig.hf_token": "--hf-token=token",
    "ModelConfig.hf_config_path": "--hf-config-path={model}",
    "ModelConfig.config_format": "--config-format=hf",
    "ModelConfig.hf_overrides": '--hf-overrides={"vocab_size": 2048}',
    "ModelConfig.trust_remote_code": "--trust-remote-code",
    "ModelConfig.code_revision": "--code-revision=some",
    "ModelConfig.tokenizer": "--tokenizer={directory}",
    "ModelConfig.tokenizer_mode": "--tokenizer-mode=hf",
    "ModelConfig.tokenizer_revision": "--tokenizer-revision=some",
    "ModelConfig.max_logprobs": "--max-logprobs=5",
    "ModelConfig.logprobs_mode": "--logprobs-mode=processed_logits",
    "ModelConfig.logits_processors": "--logits-processors=tests.engine.fields.processor:Unchanged",
    "ModelConfig.generation_config": "--generation-config=vllm",
    "ModelConfig.override_generation_config": '--override-generation-config={"top_k": 5}',
    "ModelConfig.served_model_name": "--served-model-name=some",
    "ModelConfig.renderer_num_workers": "--renderer-num-workers=2",
    "ModelConfig.allowed_local_media_path": "--allowed-local-media-path={directory}",
    "ModelConfig.allowed_media_domains": "--allowed-media-domains=example.org",
    "ModelConfig.enable_prompt_embeds": "--enable-prompt-embeds",
    "CacheConfig.block_size": "--block-size=256",
    "CacheConfig.prefix_match_unit": "--prefix-match-unit=128",
    "CacheConfig.prefix_caching_hash_algo": "--prefix-caching-hash-algo=sha256_cbor",
    "CacheConfig.gpu_memory_utilization": "--gpu-memory-utilization=0.5",
    "CacheConfig.num_gpu_blocks_override": "--num-gpu-blocks-override=99",
    "CacheConfig.kv_cache_memory_bytes": "--kv-cache-memory-bytes=99999999",
    "ParallelConfig.distributed_timeout_seconds": "--distributed-timeout-seconds=999",
    "ParallelConfig.cpu_distributed_timeout_seconds": "--cpu-distributed-timeout-seconds=999",
    "ParallelConfig.max_parallel_loading_workers": "--max-parallel-loading-workers=1",
    "ParallelConfig.dp_sync_interval": "--dp-sync-interval=9",
    "ParallelConfig.dbo_decode_token_threshold": "--dbo-decode-token-threshold=9",
    "ParallelConfig.dbo_prefill_token_threshold": "--dbo-prefill-token-threshold=9",
    "ParallelConfig.master_port": "--master-port=29999",
    "KernelConfig.enable_jit_warmup": '--kernel-config={"enable_jit_warmup": false}',
    "KernelConfig.enable_cutedsl_warmup": '--kernel-config={"enable_cutedsl_warmup": false}',
    "CompilationConfig.debug_dump_path": '-cc={"debug_dump_path": "{directory}"}',
    "CompilationConfig.cache_dir": '-cc={"cache_dir": "{directory}"}',
    "CompilationConfig.compile_cache_save_format": '-cc={"compile_cache_save_format": "unpacked"}',
    "CompilationConfig.cudagraph_mode": '-cc={"cudagraph_mode": "NONE"}',
    "CompilationConfig.compile_sizes": '-cc={"compile_sizes": [1]}',
    "VllmConfig.shutdown_timeout": "--shutdown-timeout=7",
    "VllmConfig.performance_mode": "--performance-mode=throughput",
    "VllmConfig.optimization_level": "--optimization-level=0",
    # The probe's prompt is one step all the same: matrices of other sizes round otherwise, in the
    # engine's own cache too, where one thread computes.
    "SchedulerConfig.max_num_batched_tokens": "--max-num-batched-tokens=1024",
    "SchedulerConfig.max_num_seqs": "--max-num-seqs=7",
    "SchedulerConfig.long_prefill_token_threshold": "--long-prefill-token-threshold=200",
    "SchedulerConfig.policy": "--scheduling-policy=priority",
    "SchedulerConfig.scheduler_reserve_full_isl": "--no-scheduler-reserve-full-isl",
    "SchedulerConfig.watermark": "--watermark=0.1",
    "SchedulerConfig.prefill_schedule_interval": "--prefill-schedule-interval=2",
    "SchedulerConfig.stream_interval": "--stream-interval=3",
    "SchedulerConfig.max_num_queued_reqs": "--max-num-queued-reqs=9",
    "SchedulerConfig.max_num_queued_tokens": "--max-num-queued-tokens=9999",
    "SchedulerConfig.disable_hybrid_kv_cache_manager": "--disable-hybrid-kv-cache-manager",
    "LoadConfig.download_dir": "--download-dir={directory}",
    "LoadConfig.safetensors_load_strategy": "--safetensors-load-strategy=eager",
    "LoadConfig.ignore_patterns": "--ignore-patterns=*.none",
    "LoadConfig.pt_load_map_location": "--pt-load-map-location=cpu",
    "LoadConfig.use_tqdm_on_load": "--no-use-tqdm-on-load",
    "StructuredOutputsConfig.backend": '--structured-outputs-config={"backend": "guidance"}',
    "ObservabilityConfig.kv_cache_metrics": "--kv-cache-metrics",
    "ObservabilityConfig.cudagraph_metrics": "--cudagraph-metrics",
    "ObservabilityConfig.enable_mfu_metrics": "--enable-mfu-metrics",
    "ObservabilityConfig.jit_monitor_verbose": "--jit-monitor-verbose",
    "LoggingConfig.log_level": "--log-level=ERROR",
    "ProfilerConfig.profiler": '--profiler-config={"profiler": "torch", '
    '"torch_profiler_dir": "{directory}"}',
    "KVEventsConfig.topic": '--kv-events-config={"topic": "some"}',
}
"""Arguments of an engine, by the field that they change."""

UNTRIED: Reasons = {
    "vLLM sets it itself.": "CacheConfig._block_size_resolved CacheConfig.hash_block_size "
    "CacheConfig.cache_hit_alignment_tokens CacheConfig.effective_attention_block_size "
    "CacheConfig.is_attention_free CacheConfig.kv_cache_layout CacheConfig.num_cpu_blocks "
    "CacheConfig.kv_cache_max_concurrency CacheConfig.kv_cache_size_tokens "
    "CacheConfig.mamba_page_size_padded CacheConfig.num_gpu_blocks CacheConfig.sliding_window "
    "CacheConfig.skip_page_size_padded CacheConfig.user_specified_block_size "
    "CompilationConfig.compilation_time CompilationConfig.disabled_custom_ops "
    "CompilationConfig.enabled_custom_ops CompilationConfig.encoder_compilation_time "
    "CompilationConfig.fast_moe_cold_start CompilationConfig.local_cache_dir "
    "CompilationConfig.static_all_moe_layers CompilationConfig.static_forward_context "
    "CompilationConfig.traced_files ModelConfig.hf_config ModelConfig.hf_text_config "
    "ModelConfig.is_submodel_config ModelConfig.model_weights "
    "ModelConfig.spec_target_max_model_len ModelConfig.word_embeddings_untied_by_checkpoint "
    "MultiModalConfig.allow_missing_mm_embeddings ParallelConfig._coord_store_port "
    "ParallelConfig._allow_auto_resolve_cp_interleave_size ParallelConfig._api_process_count "
    "ParallelConfig._api_process_rank ParallelConfig._data_parallel_master_port_list "
    "ParallelConfig.assigned_physical_gpu_ids ParallelConfig.data_parallel_index "
    "ParallelConfig.data_parallel_master_ip ParallelConfig.data_parallel_master_port "
    "ParallelConfig.data_parallel_rank_local ParallelConfig.is_moe_model ParallelConfig.rank "
    "ParallelConfig.placement_group ParallelConfig.ray_runtime_env ParallelConfig.world_size "
    "ReasoningConfig._enabled ReasoningConfig._natural_reasoning_end_token_ids "
    "ReasoningConfig._reasoning_end_token_ids ReasoningConfig._reasoning_start_token_ids "
    "SchedulerConfig.encoder_cache_size SchedulerConfig.is_multimodal_model "
    "SchedulerConfig.max_num_encoder_input_tokens SchedulerConfig.runner_type "
    "SpeculativeConfig.draft_load_config "
    "SpeculativeConfig.draft_parallel_config SpeculativeConfig.target_model_config "
    "SpeculativeConfig.target_parallel_config VllmConfig.instance_id "
    "ECTransferConfig.mm_encoder_output_widths DeviceConfig.device_type",
    "It holds a configuration, whose fields are here.": "ModelConfig.pooler_config "
    "ParallelConfig.fault_tolerance_config OffloadConfig.uva OffloadConfig.prefetch "
    "VllmConfig.aux_output_config VllmConfig.device_config VllmConfig.ec_manager_config "
    "VllmConfig.ec_transfer_config VllmConfig.kv_events_config VllmConfig.kv_transfer_config "
    "VllmConfig.load_config VllmConfig.logging_config VllmConfig.observability_config "
    "VllmConfig.offload_config VllmConfig.profiler_config VllmConfig.reasoning_config "
    "VllmConfig.scheduler_config VllmConfig.structured_outputs_config "
    "VllmConfig.watermark_config VllmConfig.weight_transfer_config",
    "The CPU build refuses it or has none of it.": "CompilationConfig.cudagraph_capture_sizes "
    "CompilationConfig.cudagraph_copy_inputs CompilationConfig.cudagraph_decoder_replay "
    "CompilationConfig.cudagraph_mm_encoder CompilationConfig.cudagraph_num_of_warmups "
    "CompilationConfig.cudagraph_specialize_lora "
    "CompilationConfig.decoder_replay_cudagraph_capture_sizes "
    "CompilationConfig.decoder_replay_trim_threshold "
    "CompilationConfig.encoder_cudagraph_max_frames_per_batch "
    "CompilationConfig.encoder_cudagraph_max_vision_items_per_batch "
    "CompilationConfig.encoder_cudagraph_token_budgets "
    "CompilationConfig.max_cudagraph_capture_size ModelConfig.enable_cumem_allocator "
    "ModelConfig.enable_nccl_comm_suspend ModelConfig.enable_sleep_mode "
    "ModelConfig.sleep_mode_backend ModelConfig.sleep_mode_offload_cudagraph "
    "ModelConfig.sleep_preserve_parameter_names ParallelConfig.enable_dbo "
    "ParallelConfig.enable_shm_tensor_arena ParallelConfig.numa_bind "
    "ParallelConfig.numa_bind_cpus ParallelConfig.numa_bind_nodes ParallelConfig.ubatch_size "
    "OffloadConfig.offload_backend PrefetchOffloadConfig.offload_group_size "
    "PrefetchOffloadConfig.offload_num_in_group PrefetchOffloadConfig.offload_params "
    "PrefetchOffloadConfig.offload_prefetch_step UVAOffloadConfig.cpu_offload_gb "
    "UVAOffloadConfig.cpu_offload_params ObservabilityConfig.enable_layerwise_nvtx_tracing "
    "CacheConfig.kv_offloading_backend CacheConfig.kv_offloading_size "
    "ProfilerConfig.proton_profiler_dir ProfilerConfig.proton_context ProfilerConfig.proton_data "
    "ProfilerConfig.proton_backend ProfilerConfig.proton_mode ProfilerConfig.proton_hook "
    "ProfilerConfig.proton_output_format ProfilerConfig.proton_graph_attribution "
    "DeviceConfig.device LoadConfig.device",
    "It needs several processes, nodes or replicas.": "ParallelConfig.data_parallel_backend "
    "ParallelConfig.data_parallel_external_lb ParallelConfig.data_parallel_hybrid_lb "
    "ParallelConfig.data_parallel_rank ParallelConfig.data_parallel_rpc_port "
    "ParallelConfig.data_parallel_size ParallelConfig.data_parallel_size_local "
    "ParallelConfig.disable_nccl_for_dp_synchronization "
    "ParallelConfig.distributed_executor_backend ParallelConfig.elastic_ep_max_dp_size "
    "ParallelConfig.enable_batch_sharded_sampling ParallelConfig.enable_elastic_ep "
    "ParallelConfig.enable_fault_tolerance ParallelConfig.master_addr ParallelConfig.node_rank "
    "ParallelConfig.ray_workers_use_nsight FaultToleranceConfig.engine_recovery_timeout_sec "
    "ECTransferConfig.ec_connector ECTransferConfig.engine_id ECTransferConfig.ec_buffer_device "
    "ECTransferConfig.ec_buffer_size ECTransferConfig.ec_role ECTransferConfig.ec_ip "
    "ECTransferConfig.ec_port ECTransferConfig.ec_connector_extra_config "
    "ECTransferConfig.ec_connector_module_path WeightTransferConfig.backend",
    "It needs a multimodal model, a drafter, a pooling model, adapters or recurrent layers.": (
        "MultiModalConfig.limit_per_prompt MultiModalConfig.enable_mm_embeds "
        "MultiModalConfig.mm_processor_cache_gb MultiModalConfig.mm_processor_cache_type "
        "MultiModalConfig.mm_hasher_algorithm MultiModalConfig.mm_shm_cache_max_object_size_mb "
        "MultiModalConfig.mm_tensor_ipc MultiModalConfig.mm_ipc_gpu_memory_gb "
        "MultiModalConfig.mm_encoder_fp8_scale_save_path MultiModalConfig.skip_mm_profiling "
        "MultiModalConfig.mm_encoder_fp8_scale_save_margin MultiModalConfig.interleave_mm_strings "
        "SchedulerConfig.disable_chunked_mm_input EncoderCacheManagerConfig.manager_config "
        "EncoderCacheManagerConfig.encoder_cache_manager_cls PoolerConfig.task "
        "PoolerConfig.pooling_type PoolerConfig.seq_pooling_type PoolerConfig.tok_pooling_type "
        "PoolerConfig.use_activation PoolerConfig.enable_flash_late_interaction "
        "PoolerConfig.dimensions PoolerConfig.logit_mean PoolerConfig.logit_sigma "
        "PoolerConfig.step_tag_id PoolerConfig.returned_token_ids PoolerConfig.max_embed_len "
        "PoolerConfig.enable_chunked_processing LoRAConfig.max_loras LoRAConfig.max_cpu_loras "
        "LoRAConfig.max_lora_cls_labels LoRAConfig.default_mm_loras CacheConfig.mamba_block_size "
        "CacheConfig.enable_mamba_shared_prefix_checkpoint "
        "CacheConfig.prefix_cache_retention_interval "
        "AuxOutputConfig.enable_return_routed_experts AuxOutputConfig.max_bytes "
        "ModelConfig.io_processor_plugin ModelConfig.use_fp64_gumbel "
        "ModelConfig.return_sampling_mask ModelConfig.enable_trace_replay"
    ),
    "The bundled models cannot be served with another value.": "ModelConfig.skip_tokenizer_init "
    "ModelConfig.enforce_eager CacheConfig.enable_prefix_caching LoadConfig.load_format "
    "LoadConfig.model_loader_extra_config ParallelConfig.worker_extension_cls "
    "CompilationConfig.compile_ranges_endpoints SchedulerConfig.enable_chunked_prefill "
    "LoadConfig.safetensors_prefetch_num_threads LoadConfig.safetensors_prefetch_block_size",
    "It is read by the frontend, the tracer or a listener alone, as its neighbours are.": (
        "SchedulerConfig.async_scheduling SchedulerConfig.scheduler_cls "
        "SchedulerConfig.max_num_scheduled_tokens SchedulerConfig.max_num_active_seqs "
        "SchedulerConfig.long_prefill_token_threshold_adaptive "
        "WatermarkConfig.key WatermarkConfig.algorithm WatermarkConfig.alpha "
        "WatermarkConfig.context_width WatermarkConfig.deduplicate_contexts WatermarkConfig.prf "
        "WatermarkConfig.deduplicate_contexts_max_history "
        "WatermarkConfig.allow_target_only_watermarking "
        "StructuredOutputsConfig.disable_any_whitespace "
        "StructuredOutputsConfig.disable_additional_properties "
        "StructuredOutputsConfig.reasoning_parser StructuredOutputsConfig.reasoning_parser_plugin "
        "StructuredOutputsConfig.enable_in_reasoning ReasoningConfig.reasoning_parser "
        "ReasoningConfig.reasoning_start_str ReasoningConfig.reasoning_end_str "
        "ObservabilityConfig.show_hidden_metrics_for_version "
        "ObservabilityConfig.otlp_traces_endpoint ObservabilityConfig.collect_detailed_traces "
        "ObservabilityConfig.per_request_spec_decode_metrics "
        "ObservabilityConfig.kv_cache_metrics_sample ObservabilityConfig.custom_histogram_buckets "
        "ObservabilityConfig.enable_mm_processor_stats ObservabilityConfig.jit_monitor_mode "
        "ObservabilityConfig.enable_logging_iteration_details LoggingConfig.formatter "
        "LoggingConfig.configure_logging LoggingConfig.pylogging_config_file "
        "ProfilerConfig.torch_profiler_dir ProfilerConfig.torch_profiler_activities "
        "ProfilerConfig.torch_profiler_with_stack ProfilerConfig.torch_profiler_with_flops "
        "ProfilerConfig.torch_profiler_use_gzip ProfilerConfig.torch_profiler_record_shapes "
        "ProfilerConfig.torch_profiler_dump_cuda_time_total ProfilerConfig.max_iterations "
        "ProfilerConfig.torch_profiler_with_memory ProfilerConfig.capture_torch_profiler "
        "ProfilerConfig.detailed_trace_annotation ProfilerConfig.ignore_frontend "
        "ProfilerConfig.delay_iterations ProfilerConfig.warmup_iterations "
        "ProfilerConfig.active_iterations ProfilerConfig.wait_iterations "
        "KVTransferConfig.kv_connector KVTransferConfig.engine_id KVTransferConfig.kv_role "
        "KVTransferConfig.kv_buffer_device KVTransferConfig.kv_port "
        "KVTransferConfig.kv_connector_module_path KVTransferConfig.enable_permute_local_kv "
        "KVTransferConfig.kv_load_failure_policy KVTransferConfig.kv_connector_extra_config "
        "KVEventsConfig.enable_kv_cache_events KVEventsConfig.publisher KVEventsConfig.endpoint "
        "KVEventsConfig.replay_endpoint KVEventsConfig.buffer_steps KVEventsConfig.hwm "
        "KVEventsConfig.max_queue_size"
    ),
}

VALUES: Mapping[str, str] = {
    "CMAKE_BUILD_TYPE": "Debug",
    "CUDA_VISIBLE_DEVICES": "0",
    "LD_LIBRARY_PATH": "{directory}",
    "MAX_JOBS": "1",
    "MOONCAKE_PREFERRED_SEGMENT": "some",
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "some",
    "NVCC_THREADS": "1",
    "S3_ACCESS_KEY_ID": "some",
    "S3_ENDPOINT_URL": "http://127.0.0.1:1",
    "S3_SECRET_ACCESS_KEY": "some",
    "VLLM_API_KEY": "some",
    "VLLM_ASSETS_CACHE": "{directory}",
    "VLLM_BUILD_COMMIT": "some",
    "VLLM_BUILD_PIPELINE": "some",
    "VLLM_BUILD_URL": "some",
    "VLLM_CACHE_ROOT": "{directory}",
    "VLLM_COMPILE_CACHE_SAVE_FORMAT": "unpacked",
    "VLLM_CONFIG_ROOT": "{directory}",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_DEBUG_DUMP_PATH": "{directory}",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_EC_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "{directory}",
    "VLLM_GC_DEBUG": "0",
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": "container",
    "VLLM_GPU_SYNC_CHECK": "warn",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_IMAGE_TAG": "some",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_PREFIX": "some",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "{directory}",
    "VLLM_MAIN_CUDA_VERSION": "12.0",
    "VLLM_MEDIA_CACHE": "{directory}",
    "VLLM_NCCL_INCLUDE_PATH": "{directory}",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_P2P_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_PROCESS_NAME_PREFIX": "some",
    "VLLM_RPC_BASE_PATH": "{directory}",
    "VLLM_SYSTEM_START_DATE": "2020-01-01",
    "VLLM_USAGE_SOURCE": "some",
    "VLLM_XLA_CACHE_PATH": "{directory}",
}
"""Values of variables whose default is no number. A number is raised by one, a switch turned."""

UNTRIED_VARIABLES: Reasons = {
    "They make other processes, or say which one this is.": "LOCAL_RANK "
    "VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE "
    "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ENABLE_V1_MULTIPROCESSING VLLM_PORT "
    "VLLM_WORKER_MULTIPROC_METHOD VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY "
    "VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY "
    "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
    "They name libraries, files or servers that are not here.": "CUDA_HOME VLLM_CUDART_SO_PATH "
    "VLLM_CUDA_COMPATIBILITY_PATH VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_GPU_NIC_PCIE_MAPPING "
    "VLLM_LOGGING_CONFIG_PATH VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MODEL_REDIRECT_PATH "
    "VLLM_NCCL_SO_PATH VLLM_NIC_SELECTION_VARS VLLM_RUST_FRONTEND_PATH VLLM_USE_FASTOKENS "
    "VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND VLLM_USE_MODELSCOPE VLLM_TARGET_DEVICE "
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_NVTX_SCOPES_FOR_PROFILING",
    "They send statistics away, or write a line for every call.": "VLLM_NO_USAGE_STATS "
    "VLLM_DO_NOT_TRACK VLLM_USAGE_STATS_SERVER VLLM_TRACE_FUNCTION VLLM_PATTERN_MATCH_DEBUG",
    "The CPU build knows one value, or the bundled models have one.": "VLLM_KV_CACHE_LAYOUT "
    "VLLM_TEST_FORCE_LOAD_FORMAT VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_DISTRIBUTED_USE_SPLIT_GROUP",
}
