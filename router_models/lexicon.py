"""Words and phrases that tell what a request wants, by concept, English and Chinese.

A concept gathers synonyms, so that a wording never seen in training still says what it means.
Entries are written as they are tokenised: lower case, at most four tokens (a Chinese character is
a token). `Lexicon` finds all entries of a text at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from router_models.text import MAX_NGRAM, U64, edges, mix, tokenize

CONCEPTS: Mapping[str, str] = {
    "summarise": """summarize|summarise|summarizing|summarising|summary|summaries|summarization|sum up
        |sum it up|recap|tl;dr|tldr|condense|condensed|abridge|abridged|synopsis|gist|digest
        |overview of|in a nutshell|boil down|key points|main points|key takeaways|takeaways
        |main ideas|main idea|key ideas|highlights of|outline of|shorten|abstract of
        |abstract for|précis|executive summary|minutes|meeting notes|bullet points|essence of
        |core message|main argument|most important points|distill|distil|brief version
        |shorter version|headline for|write an outline|what happened in|crux of|in brief
        |short version|briefly describe the|central points|总结|概括|摘要|概述|归纳|小结|提炼
        |要点|梗概|简述|纪要|概要|大意|主旨|中心思想|缩写|精简|浓缩|综述|提要|主要内容|核心内容
        |核心观点|主要观点|重点内容|关键信息|太长不看|讲了什么|说了什么|谈了什么|关键点""",
    "translate": """vertaal|번역|訳して|翻訳|in inglese|al inglés|auf englisch|en anglais|на английский
        |translate|translates|translated|translating|translation|translations|translator
        |render into|render this|render the following|rendering into|interpret into|localize
        |localise|put into|put this into|say this in|how do you say|how would you say
        |convert to english|convert into english|into english|into chinese|into german
        |into french|into spanish|into japanese|in english please|to english|to chinese
        |to german|to french|to spanish|to japanese|to russian|to korean|to italian
        |english version|chinese version|german version|french version|express in
        |target language|source language|traduce|traduire|traduis|traduzca|übersetze|übersetzen
        |übersetzung|traduci|traduza|переведи|переведите|mandarin|traduction|traducción|翻译
        |译成|译为|译文|译作|翻成|英译|汉译|中译|互译|怎么说|英文表达|英语表达|中文表达|英文版
        |中文版|换成英文|换成中文|转成英文|转成中文|口译|笔译|改成英文""",
    "language": """english|chinese|german|french|spanish|japanese|korean|russian|italian|portuguese|arabic
        |simplified chinese|latin|dutch|polish|turkish|hindi|vietnamese|thai|mandarin|cantonese
        |deutsch|français|英文|英语|中文|汉语|德语|德文|法语|法文|日语|日文|韩语|俄语|西班牙语
        |意大利语|文言文|白话|简体|繁体|外语""",
    "edit_code": """corrige|arregla|behebe|ändere|fix|fixes|fixed|bug|bugs|buggy|debug|refactor|refactored
        |modify|modified|patch|repair|rename|rewrite the code|rewrite this code
        |rewrite the function|rewrite this function|optimize|optimise|update the|edit|edited
        |change the|change this|correct the|corrected|improve the code|improve this|clean up
        |simplify|broken|incorrect|fails|failing|apply the|diff|unified diff|add a|add type
        |add docstring|add error|add logging|convert this|replace the|remove the|extract the
        |port this|port the|migrate|make it|instead of|so that it|updated code|modified code
        |complete updated|updated file|updated version|full code|whole file|revised|revise
        |corrected version|fixed version|what is wrong|not working|doesn t work|does not work
        |wrong result|adjust|修复|修改|修正|改正|重构|优化|调试|错误|漏洞|缺陷|改写|改成|改为
        |重命名|更新|完善|补丁|出错|报错|有误|不对|修改后|改进|增加|添加|删除|替换|去掉|调整
        |应用到|完整代码|新版本|需求|问题出在|改一下|修一下""",
    "complete_code": """complete|completes|completion|continue|continuing|finish|finishing|fill in|fill the
        |implement|implements|implementation|body of|function body|method body|missing code
        |missing part|rest of|remaining|autocomplete|next lines|stub|skeleton|todo|signature
        |docstring|write the body|what comes next|infill|补全|续写|完成|实现|填写|补充|补完
        |接着写|继续写|函数体|方法体|剩余|余下|空缺|缺失|写完|填充|接下来""",
    "write_code": """下载器|计算器|爬虫|小游戏|服务器
        |función|programa|código|funktion|skript|fonction|функцию|программу|function|functions
        |script|program|code|coding|algorithm|regex|regular expression|sql|query that|python
        |javascript|typescript|java|cpp|rust|golang|bash|shell|html|css|react|flask|django|class
        |method|api|endpoint|unit test|unit tests|snippet|implement|implementation|dockerfile
        |webpage|website|app|pandas|numpy|matplotlib|excel|vba|matlab|php|ruby|kotlin|swift
        |latex|powershell|leetcode|github|linked list|代码|函数|程序|脚本|算法|正则|编程|爬虫
        |网页|接口|类|数组|链表|排序|二叉树|数据库|示例代码|方法|编写一个|实现一个""",
    "write": """escribe|escribir|redacta|schreibe|schreib|écris|rédige|напиши|сочини|scrivi|escreva
        |cuéntame|erzähl|write|writing|compose|draft|create|craft|generate|pen|produce|author
        |come up with|make up|invent|brainstorm|imagine|rewrite|polish|continue the story
        |script for|write me|write an|write a|写|撰写|编写|创作|起草|拟|写一|写篇|写封|写首|生成
        |编一个|构思|润色|续写|扩写|仿写|作一首|填词|设计一""",
    "genre": """cuento|poema|canción|chiste|historia|ensayo|gedicht|witz|geschichte|brief|lied|poème
        |chanson|histoire|blague|стих|рассказ|песню|poesia|storia|piada|story|stories|poem|poems
        |poetry|haiku|limerick|sonnet|lyrics|song|essay|essays|letter|email|e-mail|blog
        |blog post|article about|novel|chapter|screenplay|dialogue|monologue|speech|slogan
        |tagline|advertisement|ad copy|joke|jokes|riddle|fairy tale|fable|fanfiction|script
        |press release|newsletter|review|cover letter|resume|cv|product description|caption
        |tweet|tweets|toast|eulogy|memoir|diary|biography|obituary|report on|proposal
        |business plan|thesis|guide|guidebook|tutorial|interview script|scene|plot|character
        |recommendation letter|invitation|announcement|manual|lesson plan|words long|word essay
        |short story|travel blog|podcast|故事|诗|诗歌|歌词|散文|小说|作文|文章|短文|信|书信|邮件
        |演讲|演讲稿|稿|文案|广告|剧本|对联|日记|游记|报告|论文|影评|书评|读后感|心得|说明书
        |童话|寓言|笑话|段子|简历|自我介绍|介绍信|推荐信|祝福|贺词|发言稿|新闻稿|教案|方案
        |计划书|策划|议论文|记叙文|绝句|律诗|宋词|情书|感谢信|申请信|请假条|检讨|口号|标语
        |字以上|字左右""",
    "role": """act as|pretend|role of|roleplay|role-play|play the role|you are a|you are an|imagine you
        |assume the role|take on the|embrace the|from the perspective|picture yourself
        |suppose you|my first request|persona|扮演|充当|担任|角色|假设你|假如你|你是一|你现在是
        |身份|作为一|我想让你|我要你|我希望你|个请求是|个要求是|第一句话|个问题是|请你以""",
    "answer_from": """answer|answers|answer the question|the question|question|context|according to|based on
        |using only|only the|from the passage|in the passage|given the|given this|given context
        |read the|reading|refer to|refers to|with reference to|passage|paragraph|excerpt
        |provided text|text above|above text|information|document|documents|article|source
        |sources|extract the answer|find the answer|quote|cite|use the following
        |the following passage|from the text|in the text|no answer|unanswerable|can be found
        |options|choices|choose|mentioned|knowledge base|retrieved|reference material|background
        |evidence|根据|依据|基于|阅读|材料|文章|上文|下文|段落|回答|问题|问|答|原文|文中|资料
        |参考|背景|下列材料|选文|篇章|结合|从中|找出|请问|文本|内容回答|以上内容|上述|给定
        |提供的|文档|上下文|引用|选项|答案|答复|作答|片段""",
    "document": """article|meeting|transcript|conversation|discussion|document|report|paper|chapter|news
        |post|thread|minutes of|speakers|interview|call|email thread|review|text below
        |following text|passage|dialogue|story below|speech|会议|记录|对话|访谈|讨论|新闻|报道
        |文章|文本|讲座|发言|这段|下面这|以下内容|以下文字|上面|正文|全文|文字""",
    "reason": """cuánto|cuántos|cuántas|wie viele|wie viel|combien|сколько|quanti|quantos|berechne
        |calcula|how old|belong|odd one out|how many|how much|how long|how far|how fast
        |calculate|compute|solve|solution|step by step|equation|total|each|times as|percent
        |percentage|twice|half|average|sum of|difference between the|remainder|probability|prove
        |proof|find the value|what is the value|how tall|per hour|per day|altogether|in total
        |left over|cost|ratio|divided|multiplied|area|perimeter|volume|speed|remaining|dozen
        |therefore|deduce|logic|puzzle|riddle|think step|show your work|show your reasoning
        |reasoning|final answer|evaluate|integral|derivative|simplify|work out|estimate|if a
        |then what|chain of thought|solve for|workings|多少|几个|几只|几人|几天|几本|几元|几分
        |计算|求|解|解题|过程|一共|平均|每|倍|剩|还剩|面积|体积|周长|千米|厘米|平方|方程|证明
        |概率|推理|步骤|逐步|一步|应用题|数学|列式|总共|共有|相距|速度|小时|利润|百分|分之|算出
        |等于|得数|解答""",
    "ask": """qué|por qué|cómo|cuál|was ist|warum|wie|welche|pourquoi|comment|quel|qu est|что такое
        |почему|как|dime|explícame|erkläre|explique|quais|perché|what is|what are|what was
        |what were|who is|who was|why do|why does|why is|why are|how do|how does|how can|how to
        |how should|explain|describe|tell me|give me|what do you|can you explain|recommend
        |suggest|advice|tips|difference between|pros and cons|compare|should i|which is
        |ideas for|list of|help me|best way|think about|meaning of|define|discuss|benefits of
        |examples of|do you|are there|is it|what would|what if|introduce|什么是|是什么|为什么
        |如何|怎么|怎样|哪些|介绍|解释|说明|建议|推荐|谈谈|你认为|有没有|是否|区别|意义|影响
        |原因|应该|方法|技巧|注意|列举|给出|告诉我|请教|看法|能否|优缺点|含义|比较|哪个|哪里""",
    "tools": """function call|function calls|function calling|tool|tools|tool call|tool calls|call the
        |api call|invoke|json|json schema|parameters|arguments|available functions
        |functions available|signature|properties|required|following functions|following tools
        |access to|tool_call|tool_calls|xml tags|name and arguments|type: function|工具|函数调用
        |调用函数|调用|参数|可用的|以下函数|以下工具|插件|接口|格式输出|函数签名|需要时|外部""",
    "greeting": """hello|hi there|hey|good morning|thanks|thank you|please help|how are you|nice to meet
        |你好|您好|谢谢|早上好|在吗|聊聊|哈喽|请帮""",
    "code_word": """def|return|import|public|static|void|const|var|let|elif|else|endif|struct|fn|func|impl
        |namespace|using|include|int|string|bool|float|null|none|true|false|self|this|new
        |private|async|await|lambda|print|printf|console|std|vec|for i|in range|if not|len
        |append|args|kwargs|typedef|template|override|raise|except""",
}
"""Concept -> entries, separated by bars."""


class Lexicon:
    """All entries of all concepts, ready to be found in tokens."""

    _BITS = 15

    def __init__(self) -> None:
        self.concepts = tuple(CONCEPTS)
        pairs: dict[int, int] = {}  # n-gram hash -> concepts as bits
        for number, entries in enumerate(CONCEPTS.values()):
            for entry in entries.split("|"):
                tokens = tokenize(edges(entry.strip()))
                count = len(tokens.hashes)
                if not 1 <= count <= MAX_NGRAM:
                    raise ValueError(f"lexicon entry {entry.strip()!r}: {count} tokens, not 1 to {MAX_NGRAM}")
                key = int(mix(tokens.ngrams(count)[-1])[0])
                pairs[key] = pairs.get(key, 0) | 1 << number
        keys = np.array(sorted(pairs), dtype=np.uint64)
        self._keys: U64 = keys
        self._concepts: NDArray[np.int64] = np.array([pairs[int(k)] for k in keys], dtype=np.int64)
        self._may: NDArray[np.bool_] = np.zeros(1 << self._BITS, dtype=bool)
        self._shift = np.uint64(64 - self._BITS)
        self._may[(keys >> self._shift).astype(np.intp)] = True

    def find_all(self, grams: Sequence[U64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Every entry in a text, given its n-grams for n = 1, 2, ...: first token, concepts as bits."""
        hashes = mix(np.concatenate(grams))
        at = self._may[(hashes >> self._shift).astype(np.intp)].nonzero()[0]
        entry = np.minimum(self._keys.searchsorted(hashes[at]), len(self._keys) - 1)
        is_entry = self._keys[entry] == hashes[at]
        at, entry = at[is_entry], entry[is_entry]
        begins = np.cumsum([0, *(len(g) for g in grams[:-1])])
        place = at - begins[begins.searchsorted(at, side="right") - 1]
        return place, self._concepts[entry]
