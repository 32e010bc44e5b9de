"""Environment variables of vLLM, and of the libraries with which it answers: what becomes of each.

A variable acts behind the gate, where an option would have been refused. So each has a verdict, and a contract test
fails where vLLM knows one that has none. `dynamo serve` refuses those of `REFUSED` at its start and in
`ServiceArgs.envs`, and so does each process that uses vLLM, on whatever machine it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dynamo_local.sdk.config.schema import RefusedVariable

_SWITCH = frozenset({"", "0", "false"})
_IDS = "leave it out: two requests with one X-Request-Id would be taken for one"
_COPIES = "use --workers: each worker has a copy of the model, and the router spreads the requests"
_ADAPTERS = "use `dynamo endpoint create NAME --model PATH --adapter-of ENDPOINT`: no client names a path or a hub"
_HANDLERS = "leave it out: requests are checked before they reach vLLM's server"
_METRICS = "leave it out: /metrics shows all frontends together"
_ELASTIC = "leave it out: vLLM sets it in its own processes"

_PUT_BEFORE = (
    "CUSTOM_FASTAPI_INVOCATION_HANDLER", "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS",
    "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE", "CUSTOM_FASTAPI_PING_HANDLER", "CUSTOM_POST_PROCESS", "CUSTOM_PRE_PROCESS",
    "CUSTOM_SCRIPT_FILENAME", "SAGEMAKER_MODEL_PATH",
)  # fmt: skip
"""Variables of the library for Amazon SageMaker, which puts code of the user's before vLLM's server."""


def _switch(remedy: str) -> RefusedVariable:
    return RefusedVariable(remedy, _SWITCH)


REFUSED: Mapping[str, RefusedVariable] = MappingProxyType(
    {
        "VLLM_API_KEY": RefusedVariable(
            "unset it, and write the key into a file for --Frontend.api-key-file=FILE, or give each client a key of "
            "its own with `dynamo key create NAME`: both close every path"
        ),
        "VLLM_ENABLE_RESPONSES_API_STORE": _switch(
            "leave it out: `store` and `background` of /v1/responses work without, and what is kept survives the server"
        ),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _switch(_ADAPTERS),
        "VLLM_LORA_RESOLVER_CACHE_DIR": RefusedVariable(_ADAPTERS),
        "VLLM_LORA_RESOLVER_HF_REPO_LIST": RefusedVariable(_ADAPTERS),
        "VLLM_SERVER_DEV_MODE": _switch(
            "leave it out: paths that change the server are closed; --log-error-stack logs where errors come from"
        ),
        "VLLM_ENABLE_COHERE_API": _switch("leave it out: /cohere/v2/chat is closed; use /v1/chat/completions"),
        "VLLM_SKIP_MODEL_NAME_VALIDATION": _switch("give the model more names with --served-model-name"),
        "VLLM_USE_RUST_FRONTEND": _switch("leave it out: vLLM's server in Python answers behind the gate"),
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": _switch("use --enable-log-requests and --enable-log-outputs"),
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": _switch(_IDS),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": _switch("leave it out: nothing that is sent here needs pickle"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": RefusedVariable(
            "leave it out: an engine is a process of its own", frozenset({"", "1"})
        ),
        "VLLM_MODEL_REDIRECT_PATH": RefusedVariable("name the model's folder: dynamo serve FOLDER"),
        "VLLM_PORT": RefusedVariable(
            "leave it out: free ports are chosen; Kubernetes sets it for a Service named vllm, unless the pod has "
            "enableServiceLinks: false"
        ),
        "VLLM_DP_SIZE": RefusedVariable(_COPIES, frozenset({"", "1"})),
        "VLLM_DP_RANK": RefusedVariable(_COPIES, frozenset({"", "0"})),
        "VLLM_DP_RANK_LOCAL": RefusedVariable(_COPIES, frozenset({"", "0", "-1"})),
        "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": _switch(_ELASTIC),
        "VLLM_ELASTIC_EP_DRAIN_REQUESTS": _switch(_ELASTIC),
        **dict.fromkeys(("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"), RefusedVariable(_METRICS)),
        **dict.fromkeys(_PUT_BEFORE, RefusedVariable(_HANDLERS)),
        "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": _switch(_HANDLERS),
    }
)
"""Variables that would open, close or change something behind the gate."""

_STATISTICS = "not sent, unless VLLM_NO_USAGE_STATS=0 says so"

OURS: Mapping[str, str] = MappingProxyType(
    {
        "CUDA_VISIBLE_DEVICES": "the GPUs that the server may use; each worker is shown its own",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "also lets `dynamo serve` choose by a longer context than the model's",
        "VLLM_CPU_KVCACHE_SPACE": "GiB of each worker's KV cache on a CPU, by default chosen by the machine's "
        "memory. Goes before `kv-cache-memory-bytes`",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "without effect, unless VLLM_CPU_OMP_THREADS_BIND=auto: threads have the cores "
        "of the worker's slots (--cpu-slots)",
        "VLLM_CPU_OMP_THREADS_BIND": "the cores of the worker's slots, unless it is set",
        "VLLM_DO_NOT_TRACK": _STATISTICS,
        "VLLM_HOST_IP": "127.0.0.1, unless it is set: what an engine's processes listen on has no authentication",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "seconds for which the frontend keeps an idle connection open, by default 5",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "the frontend outlives engines in any case",
        "VLLM_LOGGING_LEVEL": "`WARNING`, unless it is set",
        "VLLM_LOG_STATS_INTERVAL": "seconds between the statistics that the frontend has vLLM log (at level INFO)",
        "VLLM_MAX_COMPLETION_PROMPTS": "the smaller one of this and `max-prompts` holds",
        "VLLM_MAX_N_SEQUENCES": "the smaller one of this and `max-n` holds",
        "VLLM_MAX_NUM_BAD_WORDS": "the smaller one of this and `max-words` holds; a word can be two here",
        "VLLM_MAX_STOP_STRINGS": "the smaller one of this and `max-words` holds",
        "VLLM_NO_USAGE_STATS": "`1`, unless it is set",
        "VLLM_PLUGINS": "the plugins that are named, and this project's own",
        "VLLM_REGEX_COMPILATION_TIMEOUT_S": "`0`, unless it is set: `grammar-timeout-s` is the bound",
        "VLLM_RPC_BASE_PATH": "overwritten: a private folder of the process",
        "VLLM_USAGE_SOURCE": _STATISTICS,
        "VLLM_USAGE_STATS_SERVER": _STATISTICS,
        "VLLM_USE_MODELSCOPE": "models are left to vLLM, and neither checked nor fetched before",
        "VLLM_WORKER_MULTIPROC_METHOD": "overwritten on CPUs: engines are forked",
    }
)
"""Variables that are honoured in a way of this project's own, each with that way."""

TAKEN: Mapping[str, str] = MappingProxyType(
    {
        "folders, libraries and logs": """
            CUDA_HOME FORCE_COLOR LD_LIBRARY_PATH MAX_JOBS NO_COLOR NVCC_THREADS S3_ACCESS_KEY_ID S3_ENDPOINT_URL
            S3_SECRET_ACCESS_KEY VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN
            VLLM_CONFIGURE_LOGGING VLLM_CUDA_COMPATIBILITY_PATH VLLM_CUDART_SO_PATH VLLM_DEBUG_DUMP_PATH
            VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_GC_DEBUG
            VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM
            VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH
            VLLM_PATTERN_MATCH_DEBUG VLLM_PROCESS_NAME_PREFIX VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_TARGET_DEVICE
            VLLM_TRACE_FUNCTION VLLM_TUNED_CONFIG_FOLDER VLLM_CUSTOM_SCOPES_FOR_PROFILING
            VLLM_NVTX_SCOPES_FOR_PROFILING
        """,
        "requests: templates, tools, grammars, sampling": """
            VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_COMPUTE_NANS_IN_LOGITS VLLM_ENFORCE_STRICT_TOOL_CALLING
            VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS
            VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_RAISE_ON_LOGIT_NANS VLLM_SYSTEM_START_DATE
            VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
            VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
            VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB
        """,
        "an engine's processes, and what they say to each other": """
            VLLM_DISABLE_PYNCCL VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_ENGINE_READY_TIMEOUT_S
            VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_GPU_NIC_PCIE_MAPPING VLLM_LOOPBACK_IP VLLM_MQ_MAX_CHUNK_BYTES_MB
            VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NIC_SELECTION_VARS VLLM_PP_LAYER_PARTITION VLLM_SKIP_P2P_CHECK
            VLLM_USE_NCCL_SYMM_MEM VLLM_USE_SPINLOOP_EXT VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
        """,
        "engines that Ray splits (`distributed-executor-backend: ray`)": """
            VLLM_RAY_BUNDLE_INDICES VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
            VLLM_RAY_PER_WORKER_GPUS VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
            VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM
        """,
        "connectors of `kv-transfer-config` and `ec-transfer-config`, listening without authentication; KV events": """
            MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_EC_SIDE_CHANNEL_HOST
            VLLM_EC_SIDE_CHANNEL_PORT VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS
            VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT
            VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_STORE_TIER_LOG
            VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_HANDSHAKE_TIMEOUT_S
            VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT
            VLLM_USE_SIMPLE_KV_OFFLOAD
        """,
        "memory, weights and compilation": """
            VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_DISABLE_COMPILE_CACHE VLLM_ENABLE_CUDAGRAPH_GC
            VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE
            VLLM_ENABLE_PREGRAD_PASSES VLLM_ENABLE_STARTUP_PLAN VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_FORCE_AOT_LOAD
            VLLM_GPU_SYNC_CHECK VLLM_KV_CACHE_LAYOUT VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
            VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_SSM_CONV_STATE_LAYOUT VLLM_TRITON_FORCE_FIRST_CONFIG
            VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH
            VLLM_USE_BYTECODE_HOOK VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_STANDALONE_COMPILE
            VLLM_USE_V2_MODEL_RUNNER VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
            VLLM_WSL2_ENABLE_PIN_MEMORY
        """,
        "kernels and their choice": """
            VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE
            VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_ALLREDUCE_USE_SYMM_MEM
            VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_BATCH_INVARIANT VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER
            VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_CI_ENV VLLM_CPU_INT4_W4A8 VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE
            VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE
            VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE
            VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DEEP_GEMM_WARMUP
            VLLM_DISABLED_KERNELS VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_DISABLE_SHARED_EXPERTS_STREAM
            VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_GEMM_RS VLLM_ENABLE_HPC_OPS
            VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS
            VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
            VLLM_FLOAT32_MATMUL_PRECISION VLLM_GDN_DECODE_KERNEL VLLM_HAS_FLASHINFER_CUBIN
            VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_MOE_GEMM_TYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG
            VLLM_HUMMING_USE_F16_ACCUM VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_KIMI_K3_GEMM_AR
            VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM
            VLLM_MARLIN_INPUT_DTYPE VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MLA_DISABLE
            VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_MOE_SKIP_PADDING VLLM_MOE_USE_DEEP_GEMM
            VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD
            VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_REPLICATE_EMBED VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS
            VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_AITER_MOE_DISPATCH_POLICY
            VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ROCM_MONO_DECODE
            VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB
            VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_QUANTIZATION
            VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER
            VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP4_ASM_GEMM
            VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR
            VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA
            VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_MOE_SITUV2
            VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE
            VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_SKINNY_GEMM
            VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_TRITON_USE_TD
            VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_DIRECT_DCP_A2A
            VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_FLASHINFER_MOE_INT4
            VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC VLLM_USE_OINK_OPS
            VLLM_USE_TRITON_AWQ VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND VLLM_XPU_PP_MICROBATCH
            VLLM_XPU_USE_SAMPLER_KERNEL VLLM_ZENTORCH_WEIGHT_PREPACK
        """,
    }
)
"""Variables that mean here what they mean to vLLM: names by what they are about."""

HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        "read when vLLM is built or installed, or by nothing at all": """
            CMAKE_BUILD_TYPE VERBOSE VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_DOCKER_BUILD_CONTEXT
            VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX
            VLLM_TEST_FORCE_LOAD_FORMAT VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST VLLM_XLA_CACHE_PATH
            VLLM_XLA_CHECK_RECOMPILATION
        """,
        "of `vllm serve` and `vllm bench`, which are not run": """
            VLLM_DISABLE_LOG_LOGO VLLM_RUST_FRONTEND_PATH VLLM_USE_RUST_BENCH
        """,
        "of copies of a model in one engine, which workers are instead": """
            LOCAL_RANK VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_DP_PACK_STRATEGY
            VLLM_RAY_DP_PLACEMENT_NODE_IPS
        """,
        "of TPUs": "VLLM_TPU_USING_PATHWAYS VLLM_XLA_USE_SPMD",
        "of images, audio, video and embeddings as prompts, which are refused": """
            VLLM_AUDIO_FETCH_TIMEOUT VLLM_IMAGE_FETCH_TIMEOUT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
            VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_PREPROCESS_WORKERS
            VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEDIA_CACHE
            VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_CONNECTOR VLLM_MEDIA_FETCH_MAX_RETRIES
            VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
            VLLM_VIDEO_FETCH_TIMEOUT VLLM_VIDEO_LOADER_BACKEND
        """,
    }
)
"""Variables that change nothing here: names by the reason."""
