"""Plans are looked at; nothing here changes one.

Comes in: a plan, and for some views a lowered program. Goes out: tables and timelines (`text/`), the reasons behind a
decision (`why/`), and pages and figures (`page/`).
Read `text/tables` first; `views` connects these with the methods of plans.
"""
