"""Faults between other libraries' interfaces and the operation, and in what they rely on: weights, autocast, lse."""

from functools import partial

from tests.mutation.fault import Fault
from tests.mutation.suites import INFINITE, MODEL_MASKS, WRITTEN_OUT, integration

FUNCTIONS, FLASH = "fusedattn/integrations/torch_functions.py", "fusedattn/integrations/torch_flash.py"
NN, FUSION = "fusedattn/integrations/torch_nn.py", "fusedattn/fusion.py"
HF_ATTENTION = "fusedattn/integrations/transformers/attention.py"
HF_CACHE = "fusedattn/integrations/transformers/cache.py"
HF_MASKS = "fusedattn/integrations/transformers/masks.py"
HF_MODELS = "fusedattn/integrations/transformers/models.py"
HF_SOURCES = "fusedattn/integrations/transformers/sources.py"
HF_NAMES = "fusedattn/integrations/transformers/registration.py"
HF_ROTARY = "fusedattn/integrations/transformers/rotary.py"
HF_NORMS = "fusedattn/integrations/transformers/norms.py"
FA_ARGUMENTS = "fusedattn/integrations/flash_attn/arguments.py"
FA_CACHE = "fusedattn/integrations/flash_attn/kvcache.py"
FA_CHECKS = "fusedattn/integrations/flash_attn/kvcache_checks.py"
FA_FUNCTIONS = "fusedattn/integrations/flash_attn/flash_attn_interface.py"
FA_PACKING = "fusedattn/integrations/flash_attn/packing.py"
FA_PADDING = "fusedattn/integrations/flash_attn/bert_padding.py"
FA_PAGES = "fusedattn/integrations/flash_attn/paging.py"
FA_ROTARY = "fusedattn/integrations/flash_attn/layers/rotary.py"
FA_DMASK = "fusedattn/integrations/flash_attn/dmask.py"
KERNELS_HUB = "fusedattn/integrations/kernels_hub.py"
WEIGHTS, SDPA_BACKEND = "fusedattn/weights.py", "fusedattn/backends/torch/sdpa.py"
PREPARE = "fusedattn/prepare.py"

FUSED = "tests/transformer/test_modules.py -k itself"
sdpa, replaced = partial(integration, "torch_functions"), partial(integration, "replace_sdpa")
torch_flash, multihead = partial(integration, "torch_flash"), partial(integration, "torch_nn")
models, hub = partial(integration, "transformers"), partial(integration, "kernels_hub")
flash_api, flash_cache = partial(integration, "flash_attn_api"), partial(integration, "flash_attn_kvcache")
flash_layers = partial(integration, "flash_attn_layers")
model_attention = partial(integration, "transformers_attention")
model_cache = partial(integration, "transformers_cache")
hostile, by_name = partial(integration, "transformers_hostile"), partial(integration, "transformers_by_name")

# fmt: off
TORCH_FUNCTIONS = (
    Fault(FUNCTIONS, "func is F.scaled_dot_product_attention and not _inside.active", "func is F.scaled_dot_product_attention", "sdpa: what the package calls itself is replaced by an outer context", replaced("contexts")),
    Fault(FUNCTIONS, "        finally:\n            _inside.active = False", "        finally:\n            pass", "sdpa: one call is replaced and no more", replaced("only_there")),
    Fault(FUNCTIONS, "class _Inside(threading.local):", "class _Inside:", "sdpa: threads know of each other's calls", replaced("another_thread")),
    Fault(FUNCTIONS, "            if not self.fallback:\n", "            if False:\n", "sdpa: torch's function runs unasked", replaced("fallback_counts")),
    Fault(FUNCTIONS, "logger.warning(", "logger.info(", "sdpa: what is left to torch is not shown", replaced("fallback_counts")),
    Fault(FUNCTIONS, "if reason not in self.reasons:", "if True:", "sdpa: a reason is logged in every call", replaced("fallback_counts")),
    Fault(FUNCTIONS, "if func in _CALLING_OTHERS and not any(", "if False and not any(", "sdpa: not replaced inside of other functions of torch", replaced("multihead")),
    Fault(FUNCTIONS, "**kwargs, backend=self.backend)", "**kwargs)", "sdpa: the backend of the context ignored", replaced("only_there")),
    Fault(FUNCTIONS, "            with self:\n                return function(*args, **kwargs)", "            return function(*args, **kwargs)", "sdpa: the decorator does nothing", replaced("decorator")),
    Fault(FUNCTIONS, 'masks.causal("top_left") if is_causal', "masks.causal() if is_causal", "sdpa: is_causal counts from the end", sdpa("is_attention")),
    Fault(FUNCTIONS, '"top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right"', '"bottom_right" if bias.variant.name == "UPPER_LEFT" else "top_left"', "sdpa: the two causal biases exchanged", sdpa("causal_biases")),
    Fault(FUNCTIONS, "if (bias.seq_len_q, bias.seq_len_kv) != (seqlen_q, seqlen_k):", "if bias.seq_len_q != seqlen_q:", "sdpa: a causal bias for other keys is taken", sdpa("wrong_arguments")),
    Fault(FUNCTIONS, "mask = mask & masks.boolean(scores)", "mask = masks.boolean(scores)", "sdpa: is_causal lost beside a mask", sdpa("beside_a_mask")),
    Fault(FUNCTIONS, "mask = mask & masks.boolean(scores)", "mask = mask & masks.boolean(~scores)", "sdpa: polarity of a mask", sdpa("test_masks")),
    Fault(FUNCTIONS, "bias = scores\n", "bias = scores.detach()\n", "sdpa: a float mask has no gradient", sdpa("test_masks")),
    Fault(FUNCTIONS, "(attn_mask,) = autocast(attn_mask)", "pass", "sdpa: autocast forgets the mask", sdpa("autocast")),
    Fault(FUNCTIONS, "mask=mask, scale=scale, dropout_p=dropout_p, backend=backend)", "mask=mask, dropout_p=dropout_p, backend=backend)", "sdpa of nested tensors: scale dropped", sdpa("jagged")),
    Fault(FUNCTIONS, "mask=mask, scale=scale, dropout_p=dropout_p, backend=backend)", "mask=mask, scale=scale, backend=backend)", "sdpa of nested tensors: dropout dropped", sdpa("jagged")),
    Fault(FUNCTIONS, "        scale=scale,\n        dropout_p=dropout_p,\n", "        scale=scale,\n", "sdpa: dropout dropped", sdpa("dropout_follows")),
    Fault(FUNCTIONS, "x = x.repeat_interleave(nheads // x.shape[-3], dim=-3)", "x = torch.cat([x] * (nheads // x.shape[-3]), dim=-3)", "sdpa: wrong KV head where keys and values differ in number", sdpa("grouped")),
    Fault(FUNCTIONS, "x.shape[-3] not in (1, nheads)", "x.shape[-3] != nheads", "sdpa: one head is copied for many", sdpa("not_copied")),
    Fault(FUNCTIONS, "return torch.as_tensor(total).to(query.dtype).expand(shape)", "return query.new_zeros(shape)", "sdpa: a result without elements has no gradient", sdpa("test_shapes")),
    Fault(FUNCTIONS, 'if dropout_p == 1:\n', "if False:\n", "sdpa: dropout of all weights is an error that no fallback takes", replaced("fallback_counts")),
    Fault(FUNCTIONS, " or x.lengths() is not None:", ":", "sdpa: nested tensors with gaps are not among what cannot be run", sdpa("unsupported_call")),
    Fault(FUNCTIONS, "if isinstance(x, numbers.Real) and not isinstance(x, (int, float)):", "if False:", "sdpa: numbers of NumPy refused", sdpa("scales")),
)

FLASH_OF_TORCH = (
    Fault(FLASH, "mask & masks.causal() if is_causal", 'mask & masks.causal("top_left") if is_causal', "torch's flash: is_causal counts from the start", torch_flash("heads_last")),
    Fault(FLASH, "None if x is None or x < 0 else x", "None if x is None or x <= 0 else x", "torch's flash: a window of 0 is none", torch_flash("heads_last")),
    Fault(FLASH, "lse if packed is None else lse[0]", "lse if packed is None else lse[0].T", "torch's flash: lse of packed sequences with tokens first", torch_flash("test_packed")),
    Fault(FLASH, "Packed(cum_seq_q, cum_seq_k, int(max_q)", "Packed(cum_seq_k, cum_seq_q, int(max_q)", "torch's flash: offsets of queries and keys exchanged", torch_flash("test_packed")),
    Fault(FLASH, "seed = draw_seed(q.device) if dropout_p else None", "seed = torch.zeros(1, dtype=torch.int64, device=q.device) if dropout_p else None", "torch's flash: one seed for ever", torch_flash("dropout")),
    Fault(FLASH, "reshape(-1)[:1] if dropout_p", "reshape(-1)[1:] if dropout_p", "torch's flash: the backward drops other weights", torch_flash("dropout")),
    Fault(FLASH, "dq = dq * (-1.0 if scale < 0 else 0.0)", "dq = dq * 1.0", "torch's flash: dq of a negative scale", torch_flash("test_dense")),
    Fault(FLASH, "    out.copy_(found)\n", "    out = found\n", "torch's flash: the operator in place does not write", torch_flash("test_packed")),
    Fault(FLASH, "    if alibi_slopes is not None:\n", "    if False:\n", "torch's flash: slopes are ignored", torch_flash("refused")),
    Fault(FLASH, "        if needs_gradient:\n", "        if False:\n", "torch's flash: gradients of keys that were not used are refused for another reason", torch_flash("no_gradients")),
    Fault(FLASH, "        if not is_packed:\n", "        if False:\n", "torch's flash: used keys of queries that are not packed", torch_flash("refused")),
    Fault(FLASH, "cum_seq_k[:-1, None] + torch.arange", "0 * cum_seq_k[:-1, None] + torch.arange", "torch's flash: the first sequence's keys for all", torch_flash("used_keys")),
    Fault(FLASH, "return KVCache(k, v, seqused_k.contiguous(), block_table=block_table)", "return KVCache(k, v, torch.full_like(seqused_k, block_table.shape[1] * k.shape[2]), block_table=block_table)", "torch's flash: keys behind those that are used are seen", torch_flash("used_keys")),
    Fault(FLASH, "packed=packed, num_splits=num_splits,\n", "packed=packed,\n", "torch's flash: the number of splits is ignored", torch_flash("not_copied")),
    Fault(FLASH, "for x in _heads_first(key, value))", "for x in _heads_first(key.clone(), value))", "torch's flash: a copy of the pages", torch_flash("not_copied")),
    Fault(FLASH, "    if key.shape[-1] != value.shape[-1]:\n", "    if False:\n", "torch's flash: values of another width are not refused", torch_flash("refused")),
    Fault(FLASH, "query.shape[2], key.shape[2], *_for_backward", "key.shape[2], query.shape[2], *_for_backward", "torch's flash: longest lengths exchanged", torch_flash("test_dense")),
    Fault(FLASH, "_forward(q, (k, v), packed, mask, scale, dropout_p", "_forward(q, (k, v), packed, mask, None, dropout_p", "torch's flash, heads last: scale dropped", torch_flash("heads_last")),
    Fault(FLASH, "_backward(dout, q, k, v, whole, packed, mask, scale, dropout_p, rng_state)", "_backward(dout, q, k, v, whole, packed, mask, None, dropout_p, rng_state)", "torch's flash, heads last: backward without the scale", torch_flash("heads_last")),
    Fault(FLASH, "_mask(is_causal, window_size_left, window_size_right)", "_mask(is_causal, window_size_right, window_size_left)", "torch's flash: backward with the window the other way round", torch_flash("heads_last"), nth=1),
    Fault(FLASH, "        self.library = None", "        pass", "torch's flash: stays when it is restored", torch_flash("restored")),
)

TORCH_NN = (
    Fault(NN, "masks.padding(~is_hidden)", "masks.padding(is_hidden)", "nn: polarity of padding", multihead("test_options")),
    Fault(NN, "masks.boolean(~hidden)", "masks.boolean(hidden)", "nn: polarity of attn_mask", multihead("test_options")),
    Fault(NN, "self.dropout if self.training else 0.0", "self.dropout", "nn: dropout in eval()", multihead("test_dropout")),
    Fault(NN, "batch_dim = 0 if self.batch_first or not batched else 1", "batch_dim = 0", "nn: the length for the batch", multihead("test_options")),
    Fault(NN, "hint = is_causal and not need_weights and not n_appended", "hint = is_causal and not n_appended", "nn: the causal hint decides where weights are asked for", multihead("causal_hint")),
    Fault(NN, "hint = is_causal and not need_weights and not n_appended", "hint = is_causal and not need_weights", "nn: the causal hint hides appended keys", multihead("appended")),
    Fault(NN, 'mask = mask & masks.causal("top_left")', "mask = mask & masks.causal()", "nn: the causal hint counts from the end", multihead("causal_hint")),
    Fault(NN, 'mask = mask & masks.causal("top_left")', 'mask = masks.causal("top_left")', "nn: padding lost beside the causal hint", multihead("causal_hint")),
    Fault(NN, "attention_weights(q, k, lse, **options)", 'attention_weights(q, k, lse, **{**options, "dropout_seed": draw_seed(q.device) if dropout_p else None})', "nn: weights with another dropout than the output", multihead("test_dropout")),
    Fault(NN, "weights.mean(dim=1) if average_attn_weights", "weights.sum(dim=1) if average_attn_weights", "nn: weights are summed over heads", multihead("test_options")),
    Fault(NN, "(weights if batched else weights[0]).to(q.dtype)", "(weights if batched else weights[0])", "nn: weights in float32", multihead("accuracy", "autocast")),
    Fault(NN, "out, lse = attention(q, k, v, **options, **chosen, return_lse=True)", "out, lse = attention(q, k, v, **options, return_lse=True)", "nn: backend ignored where weights are asked for", multihead("backend_is")),
    Fault(NN, "deterministic=module.deterministic, backend=module.backend,\n", "deterministic=module.deterministic,\n", "nn: backend ignored for nested tensors", multihead("backend_is")),
    Fault(NN, "longest, longest, dropout_p=dropout_p,", "longest, longest,", "nn: dropout of nested tensors dropped", multihead("backend_is")),
    Fault(NN, "module.in_proj_bias[start:stop]", "module.in_proj_bias[: stop - start]", "nn: bias of the queries for the keys", multihead("test_options")),
    Fault(NN, "padding = F.pad(padding, (0, n_appended))", "padding = F.pad(padding, (n_appended, 0))", "nn: padding counted from the appended keys", multihead("test_options")),
    Fault(NN, "(torch.cat(more_k, dim=2), torch.cat(more_v, dim=2))", "(torch.cat(more_k[::-1], dim=2), torch.cat(more_v[::-1], dim=2))", "nn: appended keys come first", multihead("test_options")),
    Fault(NN, "attn_mask.view(shape)", "attn_mask.view(shape[1], shape[0], *shape[2:]).transpose(0, 1)", "nn: masks of heads taken for those of batches", multihead("test_options")),
    Fault(NN, "sum(parts[1:], parts[0])", "parts[0]", "nn: the second of two float masks lost", multihead("test_options")),
    Fault(NN, "if is_causal and attn_mask is None:", "if False:", "nn: a promise without a mask is not refused", multihead("test_errors")),
    Fault(NN, "module.out_proj.weight, module.out_proj.bias)", "module.out_proj.weight)", "nn: bias of the output dropped", multihead("test_options")),
    Fault(NN, "        of_torch._reset_parameters()\n", "", "nn: parameters are not drawn anew", multihead("reset")),
    Fault(NN, "        return False\n", "        return True\n", "nn: the layers of torch go past the module", integration("torch_nn_layers", "test_layers")),
    Fault(NN, ", \"backend\", \"deterministic\"]", "]", "nn: options lost in TorchScript", integration("torch_nn_layers", "scripted")),
    Fault(NN, "self.__dict__.update(backend=backend, deterministic=deterministic)", "self.__dict__.update(deterministic=deterministic)", "nn: the constructor ignores its backend", multihead("copies")),
)

FUSING = (
    Fault(FUSION, "core.__dict__.update(backend=backend, deterministic=deterministic)", "core.__dict__.setdefault(\"backend\", backend)", "fuse: the backend of the first time stays", FUSED),
    Fault(FUSION, 'for name in ("backend", "deterministic", "context"):', 'for name in ("deterministic", "context"):', "unfuse: a backend stays behind", multihead("module_is_unchanged")),
    Fault(FUSION, "            hugging_face.unfuse(pretrained)\n", "            pass\n", "unfuse: models of transformers stay fused", models("unfuse")),
    Fault(FUSION, "hugging_face.fuse(pretrained, backend, deterministic)", "hugging_face.fuse(pretrained, None, deterministic)", "fuse: backend ignored for models of transformers", models("rotation_inside and not triton")),
    Fault(FUSION, "return found + (torch_nn.reasons(module) if isinstance(module, nn.MultiheadAttention) else [])", "return found", "fuse: a module of torch that cannot be fused is", multihead("reasons")),
    Fault(FUSION, "for reason in hugging_face.reasons(pretrained)]", "for reason in ()]", "fuse: a model of transformers that cannot be fused is left silently", hostile("its_own_softmax")),
    Fault(FUSION, "return TWINS | hugging_face.TWINS if hugging_face else TWINS", "return TWINS", "fuse: rotations stay outside", models("rotation_inside and not triton")),
    Fault(FUSION, 'if "transformers" not in sys.modules:', "if False:", "fuse: imports transformers for everyone", models("import")),
    Fault(HF_MODELS, "known.get(id(part.config), part.config._attn_implementation)", "part.config._attn_implementation", "transformers: fused in parts, what was before is forgotten", hostile("restores")),
    Fault(HF_MODELS, 'for name in ("fusedattn_backend", "fusedattn_deterministic"):', 'for name in ("fusedattn_deterministic",):', "transformers: a backend stays behind", models("unfuse")),
    Fault(HF_MODELS, "module.__dict__.update(fusedattn_backend=backend, fusedattn_deterministic=deterministic)", "module.__dict__.setdefault(\"fusedattn_backend\", backend)", "transformers: the backend of the first time stays", models("unfuse")),
    Fault(HF_MODELS, "isinstance(module, PreTrainedModel) and not inside", "isinstance(module, PreTrainedModel)", "transformers: models inside of models are fused by themselves", models("unfuse", "fuse_finds")),
    Fault(HF_NAMES, "    AttentionMaskInterface.register(NAME, mask_function)\n", "", "transformers: a name without masks", models("rotation_inside and not triton")),
)

TRANSFORMERS = (
    Fault(HF_ATTENTION, "    cache = cache_of(key, value)\n", "    cache = None\n", "transformers: a cache is read through views", model_cache("its_own")),
    Fault(HF_ATTENTION, "        key = cache.dense()[0][:, :, : key.shape[2]].to(query.dtype)\n", "        pass\n", "transformers: weights of codes", model_cache("weights")),
    Fault(HF_CACHE, "return F.pad(x, (0, missing))", "return F.pad(x, (missing, 0))", "transformers: a mask at the end of a cache", model_cache("its_own")),
    Fault(HF_CACHE, "            self.cache.lengths.fill_(length)\n", "", "transformers: tokens that were cut off are seen", model_cache("changes")),
    Fault(HF_CACHE, "x.copy_(x.index_select(0, beam_idx.to(x.device)))", "x.copy_(x.index_select(0, beam_idx.sort().values.to(x.device)))", "transformers: beams in the order of the old ones", model_cache("changes")),
    Fault(HF_CACHE, "self.length + query_length, 0", "self.length, 0", "transformers: new tokens are not counted by masks", model_cache("its_own")),
    Fault(HF_ATTENTION, "masks.window(sliding_window - 1, 0 if", "masks.window(sliding_window, 0 if", "transformers: a window is one key too long", models("by_itself")),
    Fault(HF_ATTENTION, "0 if causal else sliding_window - 1", "0 if causal else None", "transformers: a window to both sides has no end", models("by_itself")),
    Fault(HF_ATTENTION, "            mask = masks.causal()\n", '            mask = masks.causal("top_left")\n', "transformers: is_causal counts from the start", models("by_itself")),
    Fault(HF_ATTENTION, "        if causal is None:\n", "        if True:\n", "transformers: is_causal ignored", models("by_itself")),
    Fault(HF_ATTENTION, '"softcap": softcap,', '"softcap": None,', "transformers: soft-cap dropped", models("by_itself")),
    Fault(HF_ATTENTION, '"scale": scaling}', '"scale": None}', "transformers: scale dropped", models("by_itself")),
    Fault(HF_ATTENTION, '"sinks": s_aux,', '"sinks": None,', "transformers: sinks dropped", models("by_itself")),
    Fault(HF_ATTENTION, '"dropout_p": dropout,', '"dropout_p": 0.0,', "transformers: dropout dropped", models("dropout")),
    Fault(HF_ATTENTION, "else bias + tensor(position_bias)", "else tensor(position_bias)", "transformers: a float mask lost beside a position bias", model_attention("are_added")),
    Fault(HF_ATTENTION, "cu_seq_lens[1:].contiguous(), at, right=True)", "cu_seq_lens[1:].contiguous(), at)", "transformers: a packed sequence begins with the last token of another", models("packed_sequences and Llama")),
    Fault(HF_ATTENTION, "mask.documents.q * count + ids_q, mask.documents.k * count + ids_k", "0 * mask.documents.q + ids_q, 0 * mask.documents.k + ids_k", "transformers: the documents of a mask lost beside packed sequences", model_attention("inside_of")),
    Fault(HF_ATTENTION, "masks.padding(x) if x.dim() == 2 else masks.boolean(x)", "masks.padding(~x) if x.dim() == 2 else masks.boolean(~x)", "transformers: polarity of a mask", model_attention("mask_of_keys")),
    Fault(HF_ATTENTION, "x.dim() == 4 and x.shape[1] == 1 and x.shape[2] == 1", "x.dim() == 4 and x.shape[2] == 1", "transformers: the mask of one head for all", model_attention("each_head")),
    Fault(HF_ATTENTION, "if any(size not in (1, length) for", "if any(False and size not in (1, length) for", "transformers: a mask of another size is taken", hostile("another_size")),
    Fault(HF_MASKS, 'if getattr(func, "__name__", "") in _SUMS:', "if False:", "transformers: a bool mask is added to scores", hostile("prepared")),
    Fault(HF_ATTENTION, "attention_weights(query, key, lse, **options).to(query.dtype)", "attention_weights(query, key, lse, **options)", "transformers: weights in float32", model_attention("16_bits")),
    Fault(HF_ATTENTION, "return recorded is not None and any(", "return False and any(", "transformers: weights that are recorded do not come", by_name("asked_for")),
    Fault(HF_ATTENTION, "in WEIGHTS_WITHOUT_SINK:", "in ():", "transformers: a sink in weights that eager attention gives without", by_name("asked_for")),
    Fault(HF_ATTENTION, "mask = mask & _at(indices, *_lengths(query, key))", "pass", "transformers: sparse attention sees every key", by_name("index_selects")),
    Fault(HF_ATTENTION, "and is_causal_without_mask(type(module).__module__)", "", "transformers: causal without a mask where eager attention is not", by_name("bridge")),
    Fault(HF_SOURCES, "if adds_mask(kind) or (computes_itself(kind)", "if (computes_itself(kind)", "transformers: a class that adds masks is taken", by_name("adds_masks")),
    Fault(HF_SOURCES, "and name not in entries:", "and False:", "transformers: a table without the name is not seen", by_name("table")),
    Fault(HF_NAMES, "if requested_attention == NAME and not _is_judged.get():", "if False:", "transformers: any model may choose the name", by_name("refused_by_name")),
    Fault(HF_ATTENTION, "name not in known and x is not None and x is not False", "name not in known and x is True", "transformers: an argument that is not known is ignored", models("unknown")),
    Fault(HF_MASKS, '"sliding_window") - 1, None)', '"sliding_window"), None)', "transformers: the mask's window is one key too long", MODEL_MASKS),
    Fault(HF_MASKS, "return self.q_offset - self.kv_offset", "return self.kv_offset - self.q_offset", "transformers: masks shifted the wrong way", MODEL_MASKS),
    Fault(HF_MASKS, "right + shift", "right", "transformers: a band shifted at its left end only", MODEL_MASKS),
    Fault(HF_MASKS, "ids[:, self.q_offset : self.q_offset + self.q_length]", "ids[:, : self.q_length]", "transformers: documents of queries behind a cache", MODEL_MASKS),
    Fault(HF_MASKS, "at - start[:, None]", "at + start[:, None]", "transformers: chunks begin too early", MODEL_MASKS),
    Fault(HF_MASKS, "mask = mask & span.padding(", "mask = span.padding(", "transformers: padding alone", MODEL_MASKS),
    Fault(HF_MASKS, "masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)", "attention_mask", "transformers: padding that ends before the keys", MODEL_MASKS),
    Fault(HF_MASKS, "mask if mask is not None and mask.only_bands else None", "mask", "transformers: padding of each packed sequence counted through the row", MODEL_MASKS),
    Fault(HF_MASKS, 'options["allow_is_causal_skip"] = False', 'options["allow_is_causal_skip"] = True', "transformers: a causal mask left out for a static cache", MODEL_MASKS),
    Fault(HF_ROTARY, "past_key_values is not None or self.config", "self.config", "transformers: rotated in the cache and outside", hostile("ways_to_generate")),
    Fault(HF_ROTARY, 'past_key_values is not None or self.config._attn_implementation != "fusedattn"', "past_key_values is not None", "transformers: another implementation is not taken", models("another")),
    Fault(HF_ROTARY, "dropout=self.attention_dropout if self.training else 0.0", "dropout=self.attention_dropout", "transformers, rotation inside: dropout in eval()", models("dropout")),
    Fault(HF_ROTARY, "dropout=self.attention_dropout if self.training else 0.0", "dropout=0.0", "transformers, rotation inside: dropout dropped", models("dropout")),
    Fault(HF_ROTARY, "scaling=self.scaling", "scaling=None", "transformers, rotation inside: scale dropped", models("rotation_inside and not triton")),
    Fault(HF_ROTARY, "table[..., : self.head_dim // 2]", "table[..., ::2]", "transformers, rotation inside: tables of interleaved pairs", models("rotation_inside and not triton")),
    Fault(HF_NORMS, "q_weight, k_weight = weights", "k_weight, q_weight = weights", "transformers, rotation inside: norms of q and k exchanged", models("rotation_inside and not triton")),
    Fault(HF_ROTARY, 'softcap=getattr(self, "attn_logit_softcapping", None)', "softcap=None", "transformers, rotation inside: soft-cap dropped", models("rotation_inside and not triton")),
    Fault(HF_ROTARY, "sliding_window=self._sliding_window()", "sliding_window=None", "transformers, rotation inside: window dropped", model_attention("without_a_mask")),
)

FLASH_ATTN = (
    Fault(FA_ARGUMENTS, "0 if causal else right", "right", "flash_attn: causal forgotten", flash_api("test_meaning")),
    Fault(FA_ARGUMENTS, "None if limit < 0 else limit", "None if limit <= 0 else limit", "flash_attn: a window of 0 is none", flash_api("test_meaning")),
    Fault(FA_ARGUMENTS, "masks.window(*limits_of(causal, window_size))", 'masks.window(*limits_of(causal, window_size), "top_left")', "flash_attn: masks count from the start", flash_api("test_meaning")),
    Fault(FA_ARGUMENTS, '"scale": softmax_scale', '"scale": None', "flash_attn: scale dropped", flash_api("test_meaning")),
    Fault(FA_DMASK, "torch.where(keep, weights, -weights)", "torch.where(keep, -weights, weights)", "flash_attn: the sign of what is kept", flash_api("sign")),
    Fault(FA_DMASK, "first_batch=i, bias=own", "bias=own", "flash_attn: the first sequence's dropout for all", flash_api("sign_of_weights_of_packed")),
    Fault(FA_DMASK, "bias.slopes.expand(n, -1)[i]", "bias.slopes.expand(n, -1)[0]", "flash_attn: the first sequence's slopes for all weights", flash_api("sign_of_weights_of_packed")),
    Fault(FA_FUNCTIONS, "k, v = kv.unbind(2)", "v, k = kv.unbind(2)", "flash_attn: keys and values exchanged", flash_api("packed_tensors")),
    Fault(FA_FUNCTIONS, "lengths = (cu_seqlens_q, cu_seqlens_k, ", "lengths = (cu_seqlens_k, cu_seqlens_q, ", "flash_attn: offsets of queries and keys exchanged", flash_api("packed_sequences")),
    Fault(FA_FUNCTIONS, "window_size,\n        softcap, alibi_slopes,", "window_size,\n        softcap, None,", "flash_attn: slopes of packed tensors dropped", flash_api("packed_tensors_of")),
    Fault(FA_FUNCTIONS, "return out.contiguous(), lse, weights", "return out.contiguous(), lse.T, weights", "flash_attn: lse of packed sequences with tokens first", flash_api("packed_sequences")),
    Fault(FA_FUNCTIONS, "return attention(q, k, v, **options).transpose(1, 2).contiguous()", "return attention(q, k, v, **options).transpose(1, 2)", "flash_attn: an output that is not contiguous", flash_api("packed_tensors")),
    Fault(FA_CACHE, "starts + n_new if n_new else starts", "starts", "flash_attn: new keys are not seen", flash_cache("test_meaning")),
    Fault(FA_CACHE, "if in_order and seqlen_q > 1:", "if seqlen_q > 1:", "flash_attn: queries rotate at positions of their own though no mask orders them", flash_cache("test_rotation")),
    Fault(FA_CACHE, "limits_of(causal, window_size) != (None, None)", "limits_of(causal, window_size)[1] is not None", "flash_attn: queries in a window to the left rotate at one position", flash_cache("test_rotation")),
    Fault(FA_CACHE, "rotary_sin.float(), rotary_interleaved, positions)", "rotary_sin.float(), True, positions)", "flash_attn: new keys rotate in other pairs", flash_cache("test_rotation")),
    Fault(FA_CACHE, "rotary_interleaved, positions)", "rotary_interleaved)", "flash_attn: queries rotate from the last key on", flash_cache("long_caches")),
    Fault(FA_CACHE, "left_padding=_int32(cache_leftpad),", "left_padding=None,", "flash_attn: padding on the left is seen", flash_cache("padding")),
    Fault(FA_CACHE, "rows=_int32(cache_batch_idx),", "rows=None,", "flash_attn: the first rows for others", flash_cache("test_meaning")),
    Fault(FA_CACHE, "(k, v)), counted=True)", "(k, v)))", "flash_attn: new keys are counted twice", flash_cache("test_meaning")),
    Fault(FA_CACHE, 'max(0, whole("num_splits", num_splits)) or None', "None", "flash_attn: the number of splits is ignored", flash_cache("splits")),
    Fault(FA_CACHE, "    if torch._C._is_any_autocast_enabled():\n", "    if False:\n", "flash_attn: autocast of the queries, but not of the cache", flash_cache("autocast")),
    Fault(FA_CACHE, "k_cache.transpose(1, 2),\n", "k_cache.transpose(1, 2).clone(),\n", "flash_attn: a copy of the cache is written", flash_cache("step_by_step")),
    Fault(FA_CACHE, "@torch.no_grad()\n", "", "flash_attn: gradients reach into the caches", flash_cache("no_gradients")),
    Fault(FA_CHECKS, 'cache_seqlens, capacity - n_new)', "cache_seqlens, capacity)", "flash_attn: tokens behind the end of a cache are refused as others", flash_cache("written_beside")),
    Fault(FA_CHECKS, "if first + n_tokens > cos.shape[0]:", "if first > cos.shape[0]:", "flash_attn: positions outside of the tables are refused after the write", flash_cache("written_beside")),
    Fault(FA_CHECKS, "        call_checks.check_softcap(softcap)\n", "        pass\n", "flash_attn: a wrong number is refused after the write", flash_cache("written_beside")),
    Fault(FA_CHECKS, "if n_new and can_read(cache_batch_idx)", "if False and can_read(cache_batch_idx)", "flash_attn: one row for two sequences is refused as another argument", flash_cache("written_beside")),
    Fault(FA_PAGES, "KVCache(k, v, cu_seqlens.diff(),", "KVCache(k, v, cu_seqlens[1:],", "flash_attn: pages of a sequence as long as all before it", flash_api("read_in_place")),
    Fault(FA_PAGES, "masked_select(starts < ", "masked_select(starts <= ", "flash_attn: a page behind the last is checked", flash_cache("looked_up")),
    Fault(FA_PACKING, "token, right=True)", "token)", "flash_attn: a sequence begins with the last token of another", flash_layers("packed")),
    Fault(FA_PADDING, "packed | (unused_mask != 0)", "packed & (unused_mask != 0)", "flash_attn: unused tokens alone are packed", flash_layers("unused")),
    Fault(FA_PADDING, "packed = packed | (unused_mask != 0)\n", "packed = packed | (unused_mask != 0)\n        used_lengths = packed.sum(dim=1, dtype=torch.int32)\n", "flash_attn: unused tokens are counted", flash_layers("unused")),
    Fault(FA_ROTARY, "_with_parts(qkv, (heads_q, rotated_q), (heads_k, rotated_k))", "_with_parts(qkv, (heads_q, rotated_q))", "flash_attn: keys of a qkv are not rotated", flash_layers("stacked")),
    Fault(FA_ROTARY, "        return grad, None\n", "        return 2 * grad, None\n", "flash_attn: gradient of a leaf that is rotated in place", flash_layers("a_leaf")),
    Fault(FA_ROTARY, "    if not inplace:\n        return rotated\n", "", "flash_attn: rotated in place unasked", flash_layers("test_rotation")),
    Fault(FA_ROTARY, "    rotated_k = _rotated(\"qkv\", qkv[:, :, heads_k], cos_k, sin_k, interleaved, seqlen_offsets)\n", "    qkv[:, :, heads_q].copy_(rotated_q)\n    rotated_k = _rotated(\"qkv\", qkv[:, :, heads_k], cos_k, sin_k, interleaved, seqlen_offsets)\n", "flash_attn: queries are overwritten before keys are refused", flash_layers("before_anything")),
    Fault(FA_ROTARY, "slice(num_heads_q, num_heads_q + num_heads_k)", "slice(num_heads_q, None)", "flash_attn: values are rotated", flash_layers("stacked")),
    Fault(FA_ROTARY, "cos if cos_k is None else cos_k, sin if sin_k is None else sin_k", "cos, sin", "flash_attn: tables of the keys ignored", flash_layers("stacked")),
    Fault(FA_ROTARY, "torch.where(inside[:, None, None], rotated, x)", "rotated", "flash_attn: tokens of no sequence are rotated", flash_layers("packed")),
)

HUB_KERNEL = (
    Fault(KERNELS_HUB, "path.encode() + _sha256(variant[path])", "path.encode()", "hub: one namespace for all contents", hub("follows_the_content")),
    Fault(KERNELS_HUB, "    if changed:\n", "    if False:\n", "hub: overwrites what it did not write", hub("refuses_files")),
    Fault(KERNELS_HUB, "        (folder / path).unlink(missing_ok=True)\n", "        pass\n", "hub: files of an earlier export stay", hub("earlier")),
    Fault(KERNELS_HUB, '(NAME, "import_module", "__import__")', "(NAME,)", "hub: imports by name are not refused", hub("reach_out")),
    Fault(KERNELS_HUB, '{"torch", "triton"}', '{"torch", "triton", "numpy"}', "hub: imports of NumPy are not refused", hub("reach_out")),
    Fault(KERNELS_HUB, "return attention(q, k, v, mask=masks.causal())", "return attention(q, k, v)", "hub: the causal layer is not", hub("test_layers")),
    Fault(KERNELS_HUB, '("fusedattn.fusion", "fusedattn.integrations")', '("fusedattn.integrations",)', "hub: exports what fuses models", hub("public_names")),
)

RELIED_ON = (
    Fault(WEIGHTS, "hidden = ~visible | (lse == -math.inf)", "hidden = ~visible", "weights: a row of scores of -inf", WRITTEN_OUT),
    Fault(WEIGHTS, "torch.exp((scores - lse).masked_fill(hidden, -math.inf))", "torch.exp(scores - lse).masked_fill(hidden, 0.0)", "weights: gradients of what is hidden and overflows", WRITTEN_OUT),
    Fault(WEIGHTS, "(keep.to(dtype) / (1.0 - dropout_p))", "keep.to(dtype)", "weights: what dropout keeps does not grow", WRITTEN_OUT),
    Fault(WEIGHTS, "nheads, seqlen_q, seqlen_k, rows=rows, keys=keys)\n    return weights", "nheads, len(rows), len(keys))\n    return weights", "weights: dropout of a part as if it were the whole", WRITTEN_OUT),
    Fault(WEIGHTS, "enabled=False", "enabled=True", "weights: scores in the dtype of autocast", WRITTEN_OUT),
    Fault(WEIGHTS, "    elif dropout_p:\n", "    elif False:\n", "weights: dropout without a seed is ignored", WRITTEN_OUT),
    Fault(SDPA_BACKEND, "mask = mask & boolean(added != -math.inf)", "pass", "torch backend: a row of a bias of -inf", INFINITE),
    Fault(SDPA_BACKEND, "dtype=torch.promote_types(q.dtype, torch.float32))\n    lowest", "dtype=q.dtype)\n    lowest", "torch backend: a bias of 16 bits", INFINITE),
    Fault(PREPARE, " or x.dtype == torch.float64:", ":", "autocast: float64 does not stay", sdpa("autocast")),
    Fault(PREPARE, "x.to(torch.get_autocast_dtype(device))", "x.to(torch.bfloat16)", "autocast: one dtype for all", "tests/public/test_attention.py -k autocast"),
    Fault(PREPARE, " or not x.is_floating_point()", "", "autocast: a bool mask becomes a bias", sdpa("autocast")),
)
# fmt: on

FAULTS = (
    *TORCH_FUNCTIONS,
    *FLASH_OF_TORCH,
    *TORCH_NN,
    *FUSING,
    *TRANSFORMERS,
    *FLASH_ATTN,
    *HUB_KERNEL,
    *RELIED_ON,
)
