"""English wordings around payloads. `(a|b)` is a choice, `<slot>` is filled in by `augment`.

Slots: doc, q (question), text, lang, src (languages), code (fenced or not), bare (never fenced),
what (an edit), stub, fence (stub in a fence), problem, tools (JSON lines), query, topic, thing,
plang (programming language), job (what a program should do), n (a small number), m (a large one).
"""

from __future__ import annotations

from router_models.training.notation import choices

SUMMARY = (
    "(Give|Write|Provide|Produce|Prepare) (me |)(a|a short|a brief|a concise|a one-paragraph) (summary|"
    "overview|recap|synopsis|digest|abstract) of (the|this|the following) (text|article|passage|piece|"
    "document|report|content)(|, no more than <m> words| in <n> sentences| in bullet points)(:|.)"
    "\n\n<doc>",
    "(Sum up|Recap|Condense|Distill|Boil down|Shorten|Abridge) (this|the following|the) (article|text|"
    "story|report|passage|document|news item)(| to its essentials| for a busy reader| in about <m> "
    "words| into <n> points):\n\n<doc>",
    "<doc>\n\n(Please |)(summarise|summarize|condense|recap|sum up) (the above|this|the text above|"
    "what was said|everything above)(| briefly| in <n> sentences| in under <m> words| as bullet points)"
    ".",
    "<doc>\n\n(What is the gist|What are the main points|What are the key takeaways|What is the main "
    "idea|What does it boil down to)(| of this| of the text| here)?( Keep it short.|)",
    "(What are|List|Extract|Pull out|Identify|Highlight) the (main|key|most important|central|<n> main|"
    "<n> key) (points|takeaways|ideas|messages|findings|facts) (of|from|in) (this|the) (article|text|"
    "document|conversation|discussion|transcript)(:|.)\n\n<doc>",
    "(Text|Article|Document|Transcript|Report|Story):\n<doc>\n\n(Summary|Short summary|Synopsis|Key "
    "points|Abstract|In brief|Main points):",
    "(I don't have time to read this|This is too long for me|Here's a long read|My boss sent me this)"
    "(.|,|:) (can you|could you|please) (give me the short version|sum it up|tell me what it says in "
    "short|summarise it)(?|.)\n\n<doc>",
    "(Below|Here) is (an article|a text|a transcript|the record of a meeting|a conversation|a news "
    "story). (Write|Give|Produce) (a|its) (summary|short summary|abstract)(| of <m> words| in plain "
    "English).\n\n<doc>",
    "(Write|Create|Draft) (an executive summary|meeting minutes|meeting notes|an abstract|a brief|"
    "highlights) (of|for|from) (the following|this|the) (meeting|discussion|call|transcript|session|"
    "document)(:|.)\n\n<doc>",
    "<doc>\n\n(Write|Give|Now give|Provide) (a|an|me a) (summary|abstract|brief summary|short recap|"
    "outline)(|, please| of this( text| article| meeting| discussion|)).",
    "<doc>\n\n(tl;dr|TLDR|In short:|Summary:|To sum up:|Key takeaways:|In a nutshell:)",
    "(tl;dr|TLDR|Short version, please|Summary please)(:|\n)\n<doc>",
    "(How would you|Can you|Could you) (sum up|summarize|condense|recap) (this|the following)( article|"
    " text| passage|)( in <n> sentences| in a few words| for a child| in one sentence|)?\n\n<doc>",
    "(Highlights|A headline and a short summary|The crux|The core message) of (this|the following) "
    "(text|news|meeting):\n\n<doc>",
    "<doc>\n\n(Summarize|Recap|Sum up) (what was said|what was discussed|the debate|the decision|the "
    "exchange|the conversation) (about|on|regarding) <topic>.",
    "(Summarize|Recap|Sum up) (the discussion|the part|the remarks|the opinions|what the speakers said)"
    " (about|on) <topic>(:|.)\n\n<doc>",
    "<doc>\n(###|---|===)\n(Summarise in <n> lines|Make this shorter|Shorter version|Condensed version):",
)
SUMMARY_SYSTEM = (
    "You (are|act as) a (summarization|summarisation) (assistant|bot|engine). (Summarize|Condense) "
    "(whatever|the text) the user sends(| in <n> sentences).",
    "Write a (short|concise) summary of the user's text.",
)
QA = (
    "(Use|Read|Consider|Study) (the|this) (text|passage|document|article|context|excerpt|information) "
    "(below|that follows|provided)(| carefully)(,| and) (answer|then answer|to answer) (the question|"
    "the query|the question after it)(.|:)\n\n<doc>\n\n<q>",
    "<doc>\n\n(From|According to|Based on|Judging by|In) (the|this) (text|passage|article|document|"
    "paragraph|information)( above|),( please tell me,|) <q>",
    "<doc>\n\n(Q|Question|My question|User question|Query): <q>(\nA:|\nResponse:|\nYour answer:|)",
    "(Here|Below) is (some context|a passage|a document|an excerpt|some background|an article)(:|.)"
    '\n(<<<|---|"""|)\n<doc>\n(>>>|---|"""|)\n(Now answer|Answer|Tell me|Question): <q>',
    "<q>\n\n(Use|Rely on|Take the answer from|Find it in|Look it up in) (only |)(the|this) (text|"
    "following passage|article|document|source)( below|)(:|.)\n\n<doc>",
    "(Passage|Document|Background|Source|Source text|Reference|Reference text|Information|Excerpt)( 1|)"
    "(:| -)\n<doc>\n\n(Question|Q|Asked|User): <q>(\n|\n\n)(Answer|A|Reply|Assistant)(:| in a few "
    "words:)",
    "<doc>\n\n<q>",
    "<q>\n\n<doc>",
    "<context>\n<doc>\n</context>\n\n<q>( Answer from the context only.| If it is not there, say so.| "
    "Be brief.|)",
    "(Answer|Reply to|Respond to) (the question|this question|my question) (with|from|using) (the|"
    "information in the) (document|passage|text|notes|material)(.| and nothing else.| only.)"
    "\n\n<doc>\n\n(Question:|) <q>",
    "(I am reading|I just read|My student has) this (text|passage|article)(:|.)\n\n<doc>\n\n(Could you|"
    "Can you) tell me(:|,) <q>",
    "[1] <doc>\n\n(Using|Given|With) the (retrieved|search|above) (results|documents|passages)(, cite "
    "your sources.| and nothing else,|,) <q>",
    "<q>\n(Context|Text|Passage|Article|Plot|Paragraph): <doc>",
    "<doc>\n\n(Pick|Choose|Select) the (correct|right|best) (answer|option)( for|:) <q>\n(A\\)|- ) "
    "(yes|the first)\n(B\\)|- ) (no|the second)\n(C\\)|- ) (not mentioned|neither)",
    '(Find|Locate|Extract|Quote) (the answer to|the part that answers|the words that answer) "<q>" (in|'
    "from) (the following|this) (text|passage|document)(:|.)\n\n<doc>",
    "(Suppose|Assume) (the following is true|you know only this)(:|.)\n<doc>\n(Then|Now|So): <q>",
)
QA_SYSTEM = (
    "(Answer|Reply|Respond)( the user|) (from|with|using|based on) (this|the following|the given) (document|text|manual|page|notes)"
    "( only|)(.|:| and nothing else.)\n(|\n)<doc>",
    "(<doc>\n\nUse this to answer.|The user asks about this text:\n<doc>|# Knowledge\n<doc>\n# Rules\nStay with the facts above.)",
    "(Answer|You answer) (the user's|) questions (from|using) (only |)the (context|knowledge base|"
    "document) below(.| If the answer is not there, say you do not know.)\n\n<doc>",
    "You are a (support|helpful|research) assistant. (Context|Document|Knowledge)(:| follows.)\n<doc>",
)
QUESTIONS = (
    "Who is the main person mentioned?",
    "When did this happen?",
    "What reason is given for the decision?",
    "Where did the events take place?",
    "How many people were involved?",
    "What did they decide about the budget?",
    "What does the author think about it?",
    "Why was this important?",
    "Which problem is mentioned first?",
    "What was the result?",
    "What did the speaker say about the schedule?",
    "Who disagreed, and why?",
    "What is the name of the place?",
    "How long did it take?",
    "What happened after that?",
    "What was the opinion of the group on the design?",
    "Is there any evidence for the claim?",
    "Which year is given?",
)
TRANSLATION = (
    "(Traduce|Traduzca|Traduce al inglés|Traduci in inglese|Traduis en anglais|Traduza para o inglês|"
    "Übersetze ins Englische|Bitte übersetzen|Переведи на английский|Vertaal naar het Engels)( la "
    "siguiente frase| il testo| la phrase| o texto| den Text| текст|)(:|\n) ?<text>",
    '("<text>"|<text>) (en anglais, s\'il te plaît|al inglés por favor|auf Englisch bitte|in italiano|'
    "를 영어로 번역해줘|を英語に訳して)(.|)",
    "(Translate|Render|Convert|Turn|Put) (this|the following|the text below|this text|this sentence|"
    "the passage) (into|to|in) <lang>(:|.)( |\n|\n\n)<text>",
    "(Please |Could you |Can you )(translate|render) (from <src> |)(into|to) <lang>(:|?)( |\n)<text>",
    "<text>\n\n(Translate|Render|Put|Convert) (this|it|the above|that|the text above) (into|to|in) "
    "<lang>(.|, please.|)",
    "<text>\n\n(In <lang>, please.|Now in <lang>.|What is this in <lang>?|<lang> translation:|<lang> "
    "version:|How do you say this in <lang>?)",
    '(How do you say|How would you say|How do I say|How does one say) ("<text>"|“<text>”|<text>) in <lang>?',
    "How (do|would) (you|I) say '<text>' in <lang>?",
    '(What\'s|What is) the <lang> (word |phrase |)for "<text>"?',
    "<src>: <text>\n<lang>:",
    "(<src> to <lang>|<src>-<lang>|<src> -> <lang>|Translation <src> to <lang>|Task: translate to "
    "<lang>)(:|\n|.)( |\n)<text>",
    "(Provide|Give|Write|Produce|I need) (a|an accurate|a fluent|a natural|the) <lang> (translation|"
    "version|rendering) (of|for) (the following|this)( text| sentence| paragraph|)(:|.)\n\n<text>",
    "(Translate|Please translate|Kindly translate) (the|these|this) (sentence|sentences|paragraph|"
    "message|news item|text)( below|) (from <src> |)(into|to) <lang>(.| and keep the tone.| without "
    "comments.|:)\n\n<text>",
    '(What does|What would) "<text>" (mean in <lang>|be in <lang>)?',
    "(Source|Original|Source text)( \\(<src>\\)|):\n<text>\n\n(Target|Translation|Translated text)( "
    "\\(<lang>\\)|):",
    '(My friend wrote|I received|I need to send)( this|:)( in <src>|)(:|.) "<text>" (Can you translate '
    "it to <lang>|What does it say in <lang>|Please put it into <lang>)(?|.)",
    "(As a|You are a) (professional|native|certified) translator(,|.) (translate|please translate) "
    "into <lang>(:|.)\n<text>",
)
TRANSLATION_SYSTEM = (
    "(Translate|You translate) (everything|whatever|all text) the user (writes|sends) (into|to) <lang>.",
    "You are a <src>-<lang> (translator|interpreter|translation engine). (Output|Return) only the "
    "translation.",
)
PHRASES = choices(
    "good morning|thank you very much|where is the bathroom|how much is it|I love you|long time no see|"
    "have a safe trip|one moment, please|I would like to book a table|happy birthday|the meeting is "
    "moved to Friday|better late than never"
)
LANGUAGES = (
    "English",
    "Chinese",
    "German",
    "French",
    "Spanish",
    "Japanese",
    "Russian",
    "Italian",
    "Korean",
)
EDIT = (
    "<what>(:|.|\n)\n<code>",
    "<code>\n\n(Please |)<what>.",
    "(The|This|My) (code|function|program|script|snippet) (below |)(does not work|fails|has a problem|"
    "is wrong|gives wrong results|needs a change).( <what>.|) (Give|Show|Return|Post) (me |)the "
    "(corrected|fixed|whole|complete|new) (code|version|function|file).\n\n<code>",
    "(Could you|Can you|Please|I want you to|You should) (change|update|modify|adjust|revise|improve|"
    "correct) (this|the following|my) (code|function|class|file|snippet)(:|.) <what>(.|)\n\n<code>",
    "(Given|Consider|Take|Look at) (this|the following) (code|function|program|implementation|file)(,|"
    ":)\n\n<code>\n\n<what>(.| and return everything.| and keep the rest as it is.)",
    "(Instruction|Task|Change request|Request|Requirement|TODO|Issue): <what>\n\n(Code|Original|Input|"
    "File|Current code):\n<code>(\n\n(Output|Result|New code|Updated):|)",
    "(Code|Original code|Old version):\n<code>\n\n(Instruction|Task|Change|Request|Commit message): "
    "<what>(\n\n(Output|Result|New version):|)",
    "<code>\n\n(Why does this fail\\? Fix it.|There's an error in here, find and repair it.|Something "
    "is off, please correct it.|Rewrite it so that it works.|Clean this up.|Make it faster.|Find the "
    "mistake and repair it.)",
    "(Review and fix|Debug|Repair|Refactor|Correct|Tidy up|Optimise|Simplify|Patch) (this|the "
    "following|my) (<plang> |)(code|function|snippet|method)(:|.| so that it passes its tests:)"
    "\n\n<code>",
    "(Rewrite|Rework|Transform|Convert) (the code below|this code|this function|the following)( so "
    "that it does the following|): <what>\n\n<code>",
    "<code>\n(|\n)(Add|Use|Give it|Make it use) (type hints|better names|error handling|a cache|less "
    "memory|docstrings)(.|, please.)",
    "<code>\n(|\n)(Add|Use|Give it|Make it use) (type hints|better names|error handling|a cache|less "
    "memory|docstrings)(.|, please.)",
    "(Apply|Merge) (this|the) (patch|diff|change) (to|onto|into) (the file|this file|the code)( below|)"
    "(.| and print the result.)\n\n<diff>\n\n<code>",
    "<code>\n\n(Apply|Merge) (this|the following) (patch|diff|change)( and give me the new file|):\n<diff>",
    "(I have|I've got|I wrote) (the following|this) (code|<plang> code|function)(:|.)\n<code>\n(I need "
    "to|I want to|I'd like to|Help me to|How do I)(:| make this change:) <what>(.|)",
    "<what>. (Only output|Reply with|Return only) (the code|the new code|the edited code).\n<bare>",
    "(Edit|Modify|Change) (the file|src/main.py|app.py|this module) (as follows|like this)(:|.) "
    "<what>\n\n<bare>",
)
EDIT_SYSTEM = (
    "You are (a code editor|an expert programmer|a coding assistant) (that edits|who edits|which "
    "changes) the user's code as (told|instructed)(.| and returns the full file.)",
)
EDITS = (
    "(add|put in) (type hints|annotations|docstrings|error handling|logging|input validation|comments)"
    "( everywhere|)",
    "rename (the variable|the function|the parameter) (to something clearer|`x` to `count`|`foo` to "
    "`parse_line`)",
    "(handle|support|deal with) (empty input|None|negative numbers|unicode|missing keys|duplicates)( "
    "gracefully|)",
    "(make it|turn it into) (asynchronous|a class|a generator|recursive|iterative|thread-safe|a one-liner)",
    "(use|switch to) (a dictionary|list comprehensions|pathlib|f-strings|a set|binary search) (instead|"
    "instead of loops)",
    "(fix|repair|correct) the (off-by-one error|bug|wrong condition|infinite loop|crash|memory leak|"
    "typo|failing test)",
    "(remove|drop|delete) (unused imports|the debug output|duplicate code|the global variable|dead code)",
    "(speed it up|make it faster|reduce its complexity|lower memory use|optimise the inner loop)",
    "(return|raise) (a tuple|an exception|a sorted list|None|ValueError) (when the input is invalid|"
    "instead of printing)",
    "(split|extract) (the long function|the loop body|the constants) (into helpers|into a separate function)",
    "(bump the version|update the copyright year|change the default timeout|support Python 3|fix the "
    "indentation)",
    "(convert|port) (it|this) to (Python 3|TypeScript|Go|Rust|modern C\\+\\+)",
)
COMPLETE = (
    "(Finish|Continue|Fill in|Implement|Extend) (this|the|the following) (function|method|code|file|"
    "class|program|implementation|snippet)(:|.| below:| from where it stops:)\n\n<fence>",
    "<fence>\n\n(Finish it.|Continue the code.|What comes next\\?|Complete the code.|Fill in the body.|"
    "Implement it.|Write the rest.|Please complete the function.)",
    "(What|Write what) (should come|comes|goes) next in (this|the) (code|file|program)(:|?)\n<bare_stub>",
    "(Provide|Write|Give|Supply) the (implementation|missing part|missing code|rest|remaining lines|"
    "next lines|body) (of|for) (this|the) (<plang> |)(function|method|code|stub|skeleton)(:|.)\n<fence>",
    "(Here is|Below is|I have) (the start|the beginning|the signature|a stub|a skeleton) of (a|my) "
    "(<plang> |)(function|file|program|method)(:|.)( Complete it.| Please finish it.| Write the rest.| "
    "Fill in what is missing.)\n\n<fence>",
    "(Implement|Write code for) the function (described by the docstring|below according to its "
    "documentation|with this signature)(:|.)\n\n<bare_stub>",
    "<bare_stub>",
    "(Autocomplete|Code completion|Complete):\n<bare_stub>",
    "(Complete|Continue) (the code|my code|the program), (output|return|show) (only the continuation|"
    "code only|nothing but code)(:|.)\n\n<bare_stub>",
)
COMPLETE_SYSTEM = (
    "You (complete|continue) code. (Output only code|No explanations|Do not repeat the prompt).",
    "You are (a code completion engine|an autocomplete model)(.| in an editor.)",
)
NL2CODE = (
    "(Write|Create|Give me|Show me|Generate|Make|I need|Can you write|Could you write|Please write|"
    "Help me write) (a|some|a small|a simple) <plang> (function|script|program|code|class|snippet|"
    "method) (that|which|to|for|that can) <job>(.|?|)",
    "(How can I|How do I|How would you) <job> (in|with|using) <plang>? (Show|Give|Post) (me |)(code|an "
    "example|the code).",
    "(Implement|Code|Program) (something|a tool|a function|a solution) (that|to) <job> (in|using) "
    "<plang>(.|)",
    "(Using|In|With) <plang>, <job>(.|, and print the result.)",
    "<plang>: <job>",
)
JOBS = choices(
    "reverse a linked list|sort a list of numbers|read a CSV file and print the totals|find prime "
    "numbers up to n|check whether a string is a palindrome|compute Fibonacci numbers|download a web "
    "page|parse JSON from an API|send an email|merge two sorted arrays|count words in a file|build a "
    "REST endpoint|connect to a database|plot a line chart|generate random passwords|traverse a binary "
    "tree|resize images in a folder|find the longest common substring|schedule a job every hour|"
    "validate email addresses|scrape product prices|implement a stack with two queues|make a to-do "
    "list page|calculate the factorial|convert Celsius to Fahrenheit|show a login form|rename files in "
    "bulk|monitor CPU usage|solve sudoku|query the top ten customers"
)
PLANGS = choices(
    "python|Python|javascript|JavaScript|Java|C++|Go|Rust|bash|SQL|TypeScript|C#|PHP|HTML|R|Ruby|"
    "Kotlin|Swift|regex|VBA|Lua|MATLAB|PowerShell|C"
)
REASON = (
    "<problem>",
    "<problem>(\n| )(Show your work.|Explain your reasoning.|Reason step by step.|Work it out.|Give "
    "the final answer as a number.|Think carefully.|What is the answer\\?|Justify your answer.|Put the "
    "final answer in a box.)",
    "(Solve|Work out|Answer|Figure out) (this|the following)( math| word| maths| arithmetic| logic|) "
    "(problem|question|puzzle|exercise|riddle)(:|.|, showing every step:| and explain:)( |\n|\n\n)"
    "<problem>",
    "(Problem|Question|Exercise|Q|Math problem|Puzzle): <problem>(\n(Solution|Answer|A|Reasoning):|)",
    "(My homework says|Help me with this|I'm stuck on this|Here's a puzzle)(:|.) <problem>",
    "(Think|Reason|Go) (step by step|through it slowly|it through)(.|:|, then answer.)\n\n<problem>",
)
REASON_SYSTEM = (
    "You are (a math tutor|a careful reasoner|good at maths). (Think|Reason) step by step(.| and give "
    "the final number.)",
)
PROBLEMS = (
    "(Si|Juan) compra <n> manzanas a <n> euros y <m> peras a <n> euros, ¿cuánto paga en total?",
    "Ein Auto fährt <m> km in <n> Stunden. Wie schnell fährt es? Bitte hilf mir bei der Aufgabe.",
    "У Маши <m> яблок, она отдала <n>. Сколько осталось?",
    "Paul a <m> billes et en perd <n>. Combien lui en reste-t-il ?",
    "Solve for x: <n>x + <m> = <m>.",
    "What is <m> times <n>, minus <m>?",
    "A train leaves at <n> o'clock at <m> km/h and another at <m> km/h. When do they meet if the towns "
    "are <m> km apart?",
    "Anna has <m> apples and gives <n> to each of her <n> friends. How many are left?",
    "If all bloops are razzies and all razzies are lazzies, are all bloops lazzies?",
    "Find the derivative of f(x) = <n>x^<n> + <m>x.",
    "A shirt costs $<m> and is sold at <m>% off. What is the price now?",
    "What number comes next: <n>, <n>, <m>, <m>, <m>?",
    "Three people need <n> days to build a wall. How long do <n> people need?",
    "Prove that the sum of two odd numbers is even.",
    "How many ways are there to arrange the letters of LEVEL?",
    "Tom is <n> years older than Ben, and together they are <m>. How old is Ben?",
    "What is the probability of rolling two sixes with two dice?",
    "You have <n> red and <n> blue balls. You draw two. How likely are two of one colour?",
    "A farmer has chickens and cows, <m> heads and <m> legs. How many cows are there?",
    "Which word does not belong with the others: <topic>, car, wheel, engine?",
    "A is the mother of B and B is the brother of C. How are A and C related?",
    "David has three sisters. Each of them has one brother. How many brothers does David have?",
    "You overtake the second runner in a race. In which place are you now? Explain.",
    "I face north, turn right twice and then left. Which direction do I face?",
    "A man goes to work every day although he is on holiday. What could be the reasons?",
    "Which of these should be reported first? a) a slow queue b) a fight c) a lost pen. Explain your choice.",
    "If f(x) = <n>x^<n> - <m>x + <n>, find f(<n>).",
    "How many golf balls fit into a school bus? Explain your estimate step by step.",
    "How many litres of water does a city of <m> thousand people use in a year? Estimate.",
    "x + y = <m>z and x * y = <n>z^2. Express x - y in z.",
    "A is taller than B, B is taller than C. Who is the shortest, and why?",
    "What is the <m>th prime number?",
    "The triangle has vertices (0, 0), (<n>, 1) and (<n>, <n>). What is its area?",
    "My watch shows <n>:<m>. What is the angle between the hands?",
    "Which weighs more, a kilo of feathers or a kilo of steel? Explain.",
)
CHAT = (
    "(¿Qué es|¿Por qué|¿Cómo funciona|¿Cuál es|Explícame|Recomiéndame|Dime) (la inflación|el cielo "
    "azul|un motor|la capital de Perú|algo de fútbol|una receta)(?|.)",
    "(Was ist|Warum ist|Wie funktioniert|Erkläre mir|Wer war|Welche Vorteile hat) (die Inflation|der "
    "Himmel blau|ein Motor|Goethe|gesundes Essen|das Internet)(?|.)",
    "(Qu'est-ce que|Pourquoi|Comment marche|Explique-moi|Qui était) (l'inflation|le ciel bleu|un "
    "moteur|Napoléon|la lune)(?|.)",
    "(Что такое|Почему|Как работает|Расскажи про|Кто такой|Посоветуй) (инфляция|небо голубое|двигатель|"
    "игру|Пушкин|фильм)(?|.)",
    "(Che cos'è|O que é|Por que|Come funziona|Quais são) (l'inflazione|a inflação|o céu azul|un motore|"
    "os benefícios)?",
    "(What is|What's|Can you explain|Explain|Tell me about|Describe) <topic>(?|.|)( Keep it simple.| "
    "I'm a beginner.|)",
    "(Why|How) (is|does|did|can|do people care about) <topic> (matter|work|important|change our lives|"
    "begin)(?| today?)",
    "(What are|List|Name|Give me) (some|the best|<n>|a few|five) (tips|ideas|ways|reasons|examples|"
    "books|facts|benefits) (for|about|on|of) <topic>(?|.)",
    "(What do you think|What's your opinion|How do you feel) (about|on) <topic>?",
    "(Should I|Would you|Is it a good idea to) (learn|worry|care|read|invest time in) (about |)<topic>?",
    "(What is the difference|Compare|How do you choose) between <topic> and <topic>?",
    "(I feel|I'm|I have been) (bored|tired|curious|worried|new here)(,|.) (can we talk about|tell me "
    "something about|what should I know about) <topic>?",
    "(Hi|Hello|Hey|Good morning)(!|,|.) (how are you|who are you|what can you do|nice to meet you)(?|.)",
    "(Who|When|Where) (invented|started|discovered|first studied) <topic>?",
    "(What would happen if|Imagine) <topic> (disappeared|did not exist|were free)(. What then\\?|?)",
    "(What makes|How do I write|What is) a good (summary|translation|unit test|short story|code review|"
    "meeting)(?| exactly?)",
    "(Which|What) (tools|skills|apps|courses) (help|are needed) (with|for) <topic>?",
    "(Plan|Suggest|Recommend) (a trip|a weekend|a study plan|a diet|some films|a present) (around|for "
    "someone who likes|about) <topic>.",
    "(How does|Why does) (a translator|a compiler|a proof|a summary|a large language model|a debugger) work?",
    "(Are there|Do you know) (any|good) (restaurants|museums|jobs|rules|laws) (about|near|for) <topic>?",
)
CREATIVE = (
    "(Escribe|Cuéntame|Inventa) (un cuento|un poema|una canción|un chiste|una historia|un ensayo) "
    "(sobre|acerca de) (el amor|la luna|un gato|el verano|mi abuela|la música moderna).",
    "(Schreibe|Erzähl mir|Nenn mir|Dichte) (ein Gedicht|eine Geschichte|einen Witz|ein Lied|einen "
    "Brief) über (die Liebe|den Mond|eine Katze|den Sommer|meine Oma).",
    "(Écris|Raconte|Compose|Invente) (un poème|une histoire|une chanson|une blague|une lettre) sur "
    "(l'amour|la lune|un chat|l'été|ma grand-mère).",
    "(Напиши|Придумай|Сочини) (стихотворение|рассказ|песню|шутку|письмо) (о любви|про луну|про кота|о лете).",
    "(Scrivi|Raccontami) (una poesia|una storia|una canzone|una barzelletta) (sull'amore|sulla luna|su "
    "un gatto).",
    "(Escreva|Conte) (um poema|uma história|uma piada|uma música) sobre (o amor|a lua|um gato).",
    "(Write|Compose|Draft|Create|Pen|Make up|Come up with|Please write|Can you write|Could you write|"
    "Help me write) (me |)(a|an|a short|a funny|a moving|a long|a professional|a <m>-word) <thing> "
    "(about|on|for|inspired by) <topic>(.|?|)",
    "(<thing> about <topic>|A <thing> on <topic>), (about|around|at least|roughly) <m> words",
    "(I need|I want|Please produce|Generate) (a|an) <thing> (about|on|for) <topic>(.|, in a friendly "
    "tone.|, <m> words.)",
    "(You are|Imagine you are|Pretend to be|Take the role of|Play) (a pirate|a lonely robot|a "
    "detective|Shakespeare|a dragon|an old sailor|a time traveller)(.|,|:) (tell|describe|talk about|"
    "greet me and speak of|rap about) <topic>.",
    '(Continue|Finish) (this|the) story: "(Once upon a time|It was a dark night|The door opened) (and|'
    'when) <topic> changed everything..."',
    "(Rewrite|Retell) (Cinderella|the legend|the news) as a <thing> about <topic>.",
    "(Brainstorm|Invent) (<n>|ten|five) (names|slogans|taglines|titles|jokes|plot twists) (for|about) "
    "<topic>.",
)
THINGS = choices(
    "story|poem|haiku|song|letter|email|speech|blog post|essay|fairy tale|press release|product "
    "description|screenplay|dialogue|limerick|cover letter|advertisement|joke|short story|report|"
    "review|travel article|monologue|chapter|thesis|newsletter|lesson plan|proposal|guide|resignation "
    "letter|love letter|podcast script|toast|rap"
)
TOPICS = choices(
    "climate change|the moon|black holes|a lost cat|friendship|remote work|the stock market|healthy "
    "food|ancient Rome|jazz|electric cars|learning languages|insomnia|a haunted house|space travel|"
    "gardening|chess|democracy|artificial intelligence|the ocean|marathon running|a new phone|"
    "photography|Japanese culture|grief|renewable energy|job interviews|vaccines|coffee|the French "
    "Revolution|parenting|dinosaurs|social media|volcanoes|a small bakery|mental health|football|"
    "quantum physics|autumn|a summer holiday|my grandmother|cryptocurrency|the internet|sustainable "
    "fashion|bees|insurance|the new schedule|the marketing plan|costs|the product design|education "
    "policy"
)
TOOLS_SYSTEM = (
    "(You have|You have been given|You are given) (access to|the use of) (the following|these|several) "
    "(functions|tools|APIs)(:|.)\n<tools>\n(Reply|Respond|Answer) with (a JSON|a function|one or more) "
    "(call|calls|object)(.| when one is needed.)",
    "(Available|Allowed) (tools|functions|APIs)( \\(JSON\\)|):\n<tools>\n(To use one|To call a tool|If "
    'needed), (output|write|emit) (JSON with its name and arguments|a <tool_call> block|{"name": ..., '
    '"arguments": ...}).',
    "You are an (assistant|agent|expert) (that|who) (calls|uses|composes) (tools|functions|APIs).( "
    "Decide which to call.|)\n\n<tools>",
    "(# Tools|## Functions|<functions>|<available_tools>)\n<tools>\n(# Output|## Format|</functions>|"
    "</available_tools>)(\nReturn only the calls.|)",
)
GENERIC_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful, respectful and honest assistant.",
    "You are a friendly chatbot. Be concise.",
    "Answer as truthfully as you can.",
    "You are an AI assistant made by Example Corp. Today is Monday.",
    "Always reply in the language of the user.",
)
POLITE = (
    "Hi! ",
    "Hello, ",
    "Please help: ",
    "Hey there, ",
    "Quick one: ",
    "I have a request. ",
    "Good day. ",
)
THANKS = (
    " Thanks!",
    "\nThank you.",
    " Thanks in advance.",
    "\n\nThanks a lot!",
)
