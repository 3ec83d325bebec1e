// Every word of the console, English and Chinese. Names of policies, tasks, guards and reasons stay as they
// are in logs and metrics, so that they can be searched for; what they mean is said beside them.

const WORDS = {
  // frame
  skip: ["Skip to content", "跳到内容"],
  overview: ["Overview", "总览"], decisions: ["Decisions", "决策"], guards: ["Guards", "护栏"],
  model: ["Latency model", "延迟模型"], rollouts: ["Rollouts", "灰度发布"], costs: ["Costs", "成本"],
  explain: ["Explain", "解释"], chat: ["Try it", "试用"],
  ready: ["ready", "就绪"], not_ready: ["not ready", "未就绪"], draining: ["draining", "正在排空"],
  unreachable: ["The server does not answer. Trying again.", "服务器没有响应，正在重试。"],
  no_data: ["No data yet.", "暂无数据。"], up_for: ["up {0}", "已运行 {0}"],
  theme: ["Theme", "主题"], theme_auto: ["System", "跟随系统"], theme_light: ["Light", "浅色"], theme_dark: ["Dark", "深色"],
  language: ["Language", "语言"], served_model: ["Model", "模型"],
  cancel: ["Cancel", "取消"], confirm: ["Confirm", "确认"], save: ["Save", "保存"], keys: ["Keys", "密钥"],
  keys_title: ["Keys for this server", "此服务器的密钥"],
  keys_text: ["Kept in this tab only, until it is closed.", "仅保存在此标签页，关闭后即清除。"],
  admin_token: ["Admin token", "管理令牌"], api_key: ["API key, for Try it", "API 密钥（用于试用）"],
  kill: ["Kill switch", "紧急开关"], kill_on: ["Kill switch: plain decoding", "紧急开关：普通解码"],
  kill_ask: ["Decode everything plainly?", "全部改用普通解码？"],
  kill_text: ["Running requests follow at their next step. Nothing is lost; it can be lifted at any time.", "运行中的请求在下一步生效。不会丢失任何内容，可随时解除。"],
  kill_persist: ["Keep it over a restart", "重启后仍保留"],
  lift_ask: ["Lift the kill switch?", "解除紧急开关？"], lift_text: ["Requests are decided as before.", "请求将恢复原有决策。"],
  // overview
  running: ["Running", "运行中"], waiting: ["Waiting", "等待中"], tokens_per_s: ["Output", "输出"], kv_used: ["KV cache used", "KV 缓存占用"],
  queue_wait_p95: ["Queue wait p95", "排队 p95"], requests_per_s: ["Arrivals", "到达率"],
  requests: ["requests", "请求"], n_req: ["Requests", "请求数"], unit_requests_s: ["requests/s", "请求/秒"], unit_tokens_s: ["tokens/s", "token/秒"], blocks: ["{0} of {1} blocks", "{0} / {1} 块"],
  what_happened: ["What happened", "发生了什么"], nothing_happened: ["Nothing but the start.", "除启动外没有事件。"],
  range_30m: ["30 min", "30 分钟"], range_24h: ["24 h", "24 小时"], range: ["Range", "时间范围"],
  only_trouble: ["Warnings and errors", "警告与错误"], all_events: ["All", "全部"],
  policy_mix: ["Policy mix", "策略构成"], per_interval: ["requests ended, per {0}", "每 {0} 结束的请求"],
  load_over_time: ["Load", "负载"], running_waiting: ["running and waiting requests", "运行与等待的请求数"],
  latency_over_time: ["Latency", "延迟"], throughput: ["Throughput", "吞吐"],
  kind_server: ["server", "服务器"], kind_engine: ["engine", "引擎"], kind_guard: ["guard", "护栏"], kind_rollout: ["rollout", "灰度"],
  kind_drafter: ["drafter", "草稿器"], kind_planner: ["planner", "规划器"], kind_switch: ["switch", "开关"], kind_request: ["failed requests", "失败请求"],
  kind_refused: ["refused", "被拒绝"], kind_config: ["configuration", "配置"],
  // decisions
  time: ["Time", "时间"], task: ["Task", "任务"], policy: ["Policy", "策略"], reason: ["Reason", "原因"], outcome: ["Outcome", "结果"],
  tokens: ["Tokens", "Token 数"], draft_tokens: ["Draft tokens", "草稿 token"], mean_length: ["Mean acceptance length", "平均接受长度"],
  beside: ["measured, and predicted beneath", "实测值，下方为预测值"], predicted: ["predicted", "预测"],
  candidates: ["Candidates", "候选策略"], why_not: ["Why not", "未选原因"], chosen: ["chosen", "已选"], allowed: ["allowed", "允许"], not_allowed: ["not allowed", "不允许"],
  terms: ["What makes up the predicted E2E", "预测 E2E 的构成"], term: ["Term", "项"], value: ["Value", "数值"], sum: ["Sum", "合计"],
  no_decisions: ["No request was decided yet.", "尚无已决策的请求。"], filter: ["Filter", "筛选"], any: ["any", "全部"], unfold: ["Show terms", "展开"], changes: ["Policy changes", "策略变更"],
  from_token: ["from token {0}: {1}, {2}", "自第 {0} 个 token：{1}，{2}"], probabilities: ["Task probabilities", "任务概率"], load_seen: ["Load as seen", "当时负载"],
  request_id: ["Request", "请求"], tenant: ["Tenant", "租户"], expected_output: ["Expected output", "预计输出"], target_steps: ["Target steps", "目标步数"], steps_saved: ["Steps saved", "节省步数"], device_time: ["Device time", "设备时间"],
  // guards
  guard: ["Guard", "护栏"], state: ["State", "状态"], reading: ["Reading", "读数"], threshold: ["Threshold", "阈值"], since: ["Since", "持续"], opens_in: ["Probes in", "距试探"], trips: ["Trips", "触发"], samples: ["Samples", "样本"],
  all_tasks: ["all tasks", "全部任务"], state_allowed: ["allowed", "放行"], state_probing: ["probing", "试探"], state_shut: ["shut", "关闭"], observe: ["observed only", "仅观察"], off: ["off", "停用"],
  guards_note: ["shut means zero draft tokens from the next step on", "关闭：自下一步起不再起草"], no_guards: ["No door is watched yet.", "尚无护栏。"],
  // model
  heat_title: ["Acceptance by task and policy", "按任务与策略的接受率"], heat_note: ["median over recent requests of accepted / verified draft tokens", "近期请求中“接受/验证”草稿 token 的中位数"], n_requests: ["{0} req.", "{0} 请求"], too_few: ["too few", "样本不足"],
  equation: ["What a step costs", "一步的耗时"], equation_note: ["fitted online from {0} steps", "由 {0} 步在线拟合"], decode_step: ["decode step", "解码步"], prefill_step: ["prompt step", "提示步"], drafting: ["drafting with {0}", "{0} 起草"],
  scatter: ["Predicted against measured", "预测与实测"], scatter_note: ["steps, ms; band: within 20 %", "步，毫秒；灰带：20 % 以内"], predicted_ms: ["predicted, ms", "预测，毫秒"], measured_ms: ["measured, ms", "实测，毫秒"],
  fit: ["How good it is", "拟合质量"], kind: ["Steps", "步类型"], scored: ["Scored", "计分"], bias: ["Bias", "偏差"], noise: ["Scatter of equal work", "同等工作离散度"],
  yields: ["What each policy yields now", "各策略当前收益"], speedup_now: ["Speed-up now", "当前加速比"], capacity: ["Capacity, requests/s", "容量，请求/秒"], per_step: ["Tokens per step", "每步 token"], load_free: ["Prompt and answer alone", "空载耗时"],
  u_seq: ["sequences", "序列"], u_tok: ["tokens", "token"], u_kv: ["KV tokens", "KV token"], u_win: ["draft tokens × KV tokens", "草稿 token × KV token"], u_sample: ["sampled rows", "采样行"], u_ptok: ["prompt tokens", "提示 token"], u_other: ["other tokens", "其他 token"], u_call: ["calls", "调用"], u_fill: ["tokens read up on", "补读 token"], u_above: ["tokens beyond the knee", "拐点后 token"],
  // rollouts
  no_rollouts: ["No rollout is configured. Put files into canary.folder; see configs/canary/.", "未配置灰度发布。请在 canary.folder 放入文件，见 configs/canary/。"], stage: ["stage {0} of {1}", "第 {0} / {1} 阶段"], share: ["share of traffic", "流量占比"], still_needed: ["Still needed", "仍需"],
  guardrail: ["Guardrail", "约束"], limit: ["Limit", "上限"], batches: ["Batches", "批次"], verdict: ["Verdict", "判定"], promote: ["Promote", "推进"], pause: ["Pause", "暂停"], resume: ["Resume", "恢复"], rollback: ["Roll back", "回滚"],
  act_ask: ["{0} the rollout {1}?", "对灰度 {1} 执行“{0}”？"], act_text: ["The next requests are affected at once.", "后续请求立即受影响。"],
  // costs
  by_policy: ["By policy", "按策略"], by_tenant: ["By tenant", "按租户"], by_task: ["By task", "按任务"], no_tenant: ["(no key)", "（无密钥）"], since_start: ["since the server started; `specgate report` reads the decision log for longer spans", "自启动以来；更长时段请用 `specgate report` 读取决策日志"],
  per_request: ["Per request", "每请求"], per_1k: ["Per 1,000 tokens", "每千 token"], cost: ["Cost", "成本"], no_price: ["No price is set: costs.price_per_device_hour", "未设价格：costs.price_per_device_hour"], price: ["{0} {1} per device hour", "每设备小时 {0} {1}"],
  draft_time: ["Draft time", "起草时间"], network_time: ["Network time", "网络时间"], device_split: ["Where device time went", "设备时间去向"], part_draft: ["draft", "起草"], part_forward: ["forward", "前向"], part_verify: ["verify", "验证"], checks_time: ["consistency checks: {0}", "一致性检查：{0}"], memory: ["Memory", "内存"],
  target_weights: ["target weights", "目标模型权重"], target_kv: ["target KV cache", "目标 KV 缓存"], draft_weights: ["draft weights", "草稿模型权重"], draft_kv: ["draft KV cache", "草稿 KV 缓存"], other: ["other", "其他"],
  // explain
  explain_title: ["What would be decided", "将如何决策"], explain_note: ["a request body; nothing is run", "请求体；不会真正执行"], explain_button: ["Explain", "解释"], bad_json: ["This is not JSON: {0}", "不是有效的 JSON：{0}"], would_be: ["would be chosen", "将被选用"], refused_with: ["It would be refused", "将被拒绝"],
  // chat
  chat_title: ["Ask the model", "向模型提问"], chat_note: ["tokens that came from accepted drafts are coloured", "来自被接受草稿的 token 以颜色标出"], message: ["Message", "消息"], send: ["Send", "发送"], stop: ["Stop", "停止"], clear: ["Clear", "清空"], temperature: ["Temperature", "温度"], max_tokens: ["Max tokens", "最多 token"], auto: ["auto", "自动"], example: ["Name three rivers in Europe, and say in one sentence each where they rise.", "请说出欧洲的三条河流，并各用一句话说明发源地。"],
  from_target: ["from the target", "来自目标模型"], accepted_from: ["accepted from {0}", "接受自 {0}"], target_steps_for: ["{0} target steps for {1} tokens", "{1} 个 token 用了 {0} 个目标步"],
};

let language = 0;

/** "en" or "zh": what `t` answers in. */
export function setLanguage(name) {
  language = name === "zh" ? 1 : 0;
  document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
}

/** The words for a key, with {0}, {1} filled in. Keys that are not known are shown as they are. */
export function t(key, ...values) {
  const words = WORDS[key]?.[language] ?? key;
  return values.reduce((text, value, index) => text.replaceAll(`{${index}}`, String(value)), words);
}
