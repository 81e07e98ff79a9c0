package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
	"codeq/internal/store"
)

// storyCommands are the commands of stories. Words of the form name=value are options.
var storyCommands = map[string]func(w *world, a args, words []string){
	"open":  func(w *world, a args, _ []string) { w.open(a) },
	"shard": func(w *world, a args, _ []string) { w.at = int(a.word(0)[0] - '0') },
	"crash": (*world).crash,
	"now":   func(w *world, a args, _ []string) { w.pass(a.word(0), true, a.has("stalled")) },
	"wall":  func(w *world, a args, _ []string) { w.pass(a.word(0), false, false) },
	"room":  (*world).room,
	"want":  (*world).want,

	"commit": func(w *world, _ args, _ []string) { w.begin(); w.commit(w.s()) },
	"upkeep": (*world).upkeep,
	"check":  (*world).mustRest,

	"produce":  (*world).produce,
	"claim":    (*world).claim,
	"drain":    (*world).drain,
	"start":    (*world).start,
	"die":      (*world).die,
	"complete": (*world).complete,
	"extend": func(w *world, a args, _ []string) {
		w.verdict("extend", a, Decided, w.beginAt(a).Leases.Extend(w.lease(a), uint64(a.span("for", 30*time.Second).Milliseconds())))
	},
	"retry":       fail(FailRetry, -1),
	"release":     fail(FailRelease, 0),
	"return":      fail(FailReturn, 0),
	"dead-letter": fail(FailDead, 0),
	"unhandled":   fail(FailUnhandled, 0),

	"cancel": alter(AlterCancel), "redrive": alter(AlterRedrive), "forget": alter(AlterForget),
	"set-priority": alter(AlterPriority), "set-run-at": alter(AlterRunAt), "redrive-all": (*world).redriveAll,
	"bulk": (*world).bulk,

	"interest": func(w *world, a args, _ []string) {
		w.want(a, nil)
		w.begin().Mail.SetInterest(a.named["node"], keys.InterestValue{Kinds: uint64(w.wanted)}, a.has("gone"))
		w.wanted = 0
	},
	"release-key": func(w *world, a args, _ []string) {
		hash := keys.UniqueHash(a.named["queue"], a.named["tenant"], a.named["limit-key"], a.named["group"], a.word(0))
		v, err := w.begin().ReleaseKey(hash, a.word(0))
		w.verdict("release-key", a, v, err)
	},
	"configure": func(w *world, a args, _ []string) { w.configure(a, false) },
	"adopt":     func(w *world, a args, _ []string) { w.configure(a, true) },
	"schedule":  (*world).schedule,
	"delete-schedule": func(w *world, a args, _ []string) {
		w.verdict("delete-schedule", a, Decided, w.begin().Times.DeleteSchedule(a.word(0)))
	},

	"take": (*world).take, "deliver": (*world).deliver,
	"confirm": func(w *world, _ args, _ []string) { w.confirm(w.s()) },
	"lose":    func(w *world, _ args, _ []string) { w.lose(w.s()) },

	"state": (*world).state, "effects": (*world).effects, "memory": (*world).memory,
	"next": (*world).next, "forget-caches": func(w *world, _ args, _ []string) { require.True(w.t, w.s().Probe().ForgetCaches()) },
	"totals": (*world).totals, "outcome": (*world).outcomeOf, "first": (*world).first, "idle": (*world).idle, "sweep": (*world).sweep,
	"history": (*world).history, "note": (*world).note,
}

// verdict prints the result of a verb, unless the verb has succeeded in the usual way.
func (w *world) verdict(verb string, a args, v Verdict, err error) {
	subject := verb
	if len(a.plain) > 0 {
		subject += " " + a.plain[0]
	}
	switch {
	case v == Again:
		w.printf("%s: again", subject)
	case v == Full:
		w.printf("%s: full", subject)
	case err != nil:
		w.printf("%s: %s", subject, strings.TrimPrefix(err.Error(), "codeq: "))
	}
}

// pass moves the wall clock, and with it the monotonic one, which does not count stalled time.
// REQUIRES: no group is under way, because one reading serves a whole group.
func (w *world) pass(by string, both, stalled bool) {
	for _, s := range w.shards {
		require.False(w.t, s.under, "the clock moves after a commit")
	}
	d := w.span(by)
	w.Wall += uint64(d.Milliseconds())
	if both {
		if !stalled {
			w.Now += uint64(d.Milliseconds())
		}
		w.Uptime += uint64(d.Milliseconds())
	}
}

func (w *world) room(a args, _ []string) {
	for _, s := range w.shards {
		s.Room = Room(slices.Index([]string{"enough", "low", "scarce", "none", "empty"}, a.word(0)))
	}
}

// want sets the kinds of reports among the effects: events, outcomes, cancels.
func (w *world) want(a args, _ []string) {
	kinds := map[string]KindSet{"events": 1<<endOfEvents - 2 | 1<<eventUnhandled, "outcomes": WantOutcomes, "cancels": WantCancels, "progress": 1 << EventProgress}
	w.wanted = 0
	for _, word := range a.plain {
		w.wanted |= kinds[word]
	}
}

func (w *world) upkeep(args, []string) {
	require.False(w.t, w.s().under, "upkeep comes after a commit")
	if w.keepUp() == 0 {
		w.printf("nothing is due")
	}
}

func (w *world) mustRest(args, []string) {
	s := w.s()
	s.isDueAt(w.Instant)
	require.True(w.t, !s.under && s.isAtRest(), "the shard is not at rest")
	w.check(s)
}

// tasks reads new tasks; semicolons divide them. names are the names of the tasks.
func (w *world) tasks(words []string) (tasks []NewTask, names []string) {
	var all []args
	var parents []string
	for len(words) > 0 {
		end := slices.Index(words, ";")
		if end < 0 {
			end = len(words)
		}
		if a := w.args(words[:end]); len(a.named) > 0 {
			all, parents = append(all, a), append(parents, strings.Split(a.named["after"], ",")...)
		}
		words = words[min(end+1, len(words)):]
	}
	for _, a := range all {
		if n := a.number("times", 0); n > 0 {
			for i := range n {
				b := args{w, a.plain, maps.Clone(a.named)}
				b.named["name"] += strconv.Itoa(i + 1)
				tasks, names = append(tasks, w.task(b, names, false)), append(names, b.named["name"])
			}
			continue
		}
		tasks = append(tasks, w.task(a, names, slices.Contains(parents, a.named["name"])))
		names = append(names, a.named["name"])
	}
	markTwins(tasks)
	return tasks, names
}

// task makes a new task. A parent with a name of the batch is a task of the batch.
func (w *world) task(a args, batch []string, parent bool) NewTask {
	key := LaneKey{a.named["queue"], a.named["tenant"], uint8(a.number("priority", 0))}
	payload := a.named["name"]
	if p, ok := a.named["payload"]; ok {
		payload = p
	}
	rec := record.Record{
		Head: record.Head{
			MaxAttempts: uint32(a.number("max-attempts", 0)), Lease: uint64(a.span("lease", 0).Milliseconds()),
			Retention: record.Retention(a.span("retention", 0)), RunAt: a.moment("run-at"), Ties: record.Ties{Parent: parent},
		},
		GroupKey: a.named["group"], LimitKey: a.named["limit-key"], UniqueKey: a.named["unique"], Payload: []byte(payload),
	}
	if rec.UniqueKey != "" {
		rec.UniqueFor = uint64(a.span("unique-for", 0).Milliseconds())
		rec.MaxWait = uint64(a.span("max-wait", 0).Milliseconds())
		for word, flag := range map[string]uint8{
			"replace": record.ReplaceWaiting, "release-on-complete": record.ReleaseOnComplete, "release-on-dead": record.ReleaseOnDead,
			"release-on-claim": record.ReleaseOnClaim,
		} {
			if a.has(word) {
				rec.Flags |= flag
			}
		}
	}
	tie(&key, &rec)
	w.scopes[rec.Limit], w.scopes[rec.Group], w.scopes[0] = "limit "+rec.LimitKey, "group "+rec.GroupKey, ""
	w.uniq[rec.Unique] = rec.UniqueKey + maybe(" of tenant ", key.Tenant)
	if after := a.named["after"]; after != "" {
		rec.OnDead = uint8(max(0, slices.Index([]string{"hold", "cancel", "run"}, a.named["on-dead"])))
		rec.OnMissing = uint8(max(0, slices.Index([]string{"run", "cancel", "refuse"}, a.named["on-missing"])))
		for name := range strings.SplitSeq(after, ",") {
			if n := slices.Index(batch, name); n >= 0 {
				rec.Parents = append(rec.Parents, keys.Nth(n))
			} else {
				rec.Parents = append(rec.Parents, w.id(name))
			}
		}
	}
	t := NewTask{Key: key}
	t.Encode(&rec, nil)
	return t
}

// produce produces tasks, and names them. With call=life/seq/low before them, a node produces them.
func (w *world) produce(_ args, words []string) {
	var call keys.CallNumber
	if len(words) > 0 && strings.HasPrefix(words[0], "call=") {
		_, err := fmt.Sscanf(words[0], "call=%d/%d/%d", &call.Incarnation, &call.Seq, &call.Low)
		require.NoError(w.t, err)
		call.Node, words = "n", words[1:]
	}
	tasks, names := w.tasks(words)
	var out Produced
	v, err := w.begin().Produce(tasks, &call, &out)
	w.verdict("produce "+strings.Join(names, " "), args{}, v, err)
	for i, id := range out.IDs {
		switch known := w.names[id]; {
		case slices.Contains(out.Duplicates, i):
			w.printf("%s is a duplicate of %s", names[i], w.name(id))
		case id == keys.ID{}:
			w.printf("%s belongs to another shard", names[i])
		case known != "" && known != names[i]:
			w.printf("%s replaces %s", names[i], known)
		default:
			w.setName(w.s(), id, names[i])
		}
	}
}

// claim is the claim of an owner with an open gate. With "wait", the next groups decide it again as
// long as it depends on a refill.
func (w *world) claim(a args, _ []string) {
	for pending := w.claimOnce(a); pending && a.has("wait"); pending = w.claimOnce(a) {
		w.commit(w.s())
	}
}

func (w *world) claimOnce(a args) (pending bool) {
	s := w.begin()
	q := s.Names.Queues[a.named["queue"]]
	granted := 0
	for q != nil && granted < a.number("max", 1) {
		var l *Lane
		if l, pending = s.Next(q, uint64(a.number("rank", 0))); l == nil {
			break
		}
		grants, err := s.Grant(l, uint64(a.span("lease", 30*time.Second).Milliseconds()), Holder{
			Local: a.has("local"), Handled: a.has("handled"), Worker: a.named["worker"], Process: uint64(a.number("process", 0)),
		}, nil)
		require.NoError(w.t, err)
		g := &grants[0]
		w.nameNew(s)
		rec, err := record.Decode(g.Rec)
		require.NoError(w.t, err)
		name := w.name(g.Receipt.ID)
		w.leases[name], w.granted[g.Receipt] = g.Receipt, s
		if as := a.named["as"]; as != "" {
			w.leases[as] = g.Receipt
		}
		payload := string(rec.Payload)
		if strings.HasPrefix(name, payload) {
			payload = ""
		}
		w.printf("%s attempt %d until %s%s%s%s%s", name, g.Attempt, clock(g.Deadline), maybe(", tenant ", g.Tenant),
			maybe(", priority ", g.Priority), maybe(", payload ", payload), maybe(", error ", rec.Error))
		granted++
	}
	switch {
	case pending:
		w.printf("pending")
	case granted == 0:
		w.printf("nothing")
	}
	return pending
}

// start starts suspects that have a place of the slow start.
func (w *world) start(a args, _ []string) {
	s := w.begin()
	q := s.Names.Queues[a.named["queue"]]
	for range a.number("n", 1) {
		if !s.Suspects.Start(q, func() bool { return true }) {
			w.printf("no suspect may start")
			return
		}
	}
}

// die starts suspects, and ends the process when they are at work.
func (w *world) die(a args, words []string) {
	for range a.number("times", 1) {
		w.start(a, words)
		w.commit(w.s())
		w.keepUp()
		w.claim(args{w, []string{"local"}, map[string]string{"queue": a.named["queue"], "max": a.named["n"]}}, nil)
		w.commit(w.s())
		w.crash(args{w, []string{"killed"}, nil}, nil)
		w.keepUp()
	}
}

// drain claims and completes tasks one after the other, and does the due work, until nothing is
// left.
func (w *world) drain(a args, _ []string) {
	s := w.s()
	for more := true; more; {
		require.False(w.t, s.under, "drain comes after a commit")
		before := len(s.Leases.byID)
		w.claim(args{w, []string{"wait"}, a.named}, nil)
		granted := s.Leases.all.At(before)
		w.commit(s)
		if more = granted != nil; more {
			v, err := w.begin().Complete(granted.receipt(), nil, 0, nil, false)
			w.verdict("complete", args{}, v, err)
			w.commit(s)
		}
		more = w.keepUp() > 0 || more
	}
}

// lease is the lease of a task, or a lease that a claim has named.
func (w *world) lease(a args) Receipt {
	r, ok := w.leases[a.word(0)]
	require.True(w.t, ok, "no lease is called %q", a.word(0))
	require.Nil(w.t, w.granted[r], "nobody knows of the lease %q before the commit", a.word(0))
	return r
}

// beginAt begins an operation on a lease that may have come some time before the group.
func (w *world) beginAt(a args) *drivenShard {
	s := w.begin()
	s.Judged = w.Now - uint64(a.span("came", 0).Milliseconds())
	return s
}

func (w *world) complete(_ args, words []string) {
	head, rest := words, []string(nil)
	if n := slices.Index(words, "next:"); n >= 0 {
		head, rest = words[:n], words[n+1:]
	}
	a := w.args(head)
	next, _ := w.tasks(rest)
	s := w.beginAt(a)
	v, err := s.Complete(w.lease(a), []byte(a.named["result"]), 0, next, false)
	w.verdict("complete", a, v, err)
	w.nameNew(s)
}

func fail(how Failure, otherwise int64) func(*world, args, []string) {
	return func(w *world, a args, _ []string) {
		wait := otherwise
		if a.named["after"] != "" {
			wait = a.span("after", 0).Milliseconds()
		}
		v, err := w.beginAt(a).Fail(w.lease(a), how, nil, wait, a.named["error"])
		w.verdict([...]string{"retry", "release", "return", "dead-letter", FailUnhandled: "unhandled"}[how], a, v, err)
	}
}

func alter(how Alteration) func(*world, args, []string) {
	return func(w *world, a args, _ []string) {
		arg := uint64(a.number("to", 0))
		if how == AlterRunAt {
			arg = a.moment("at")
		}
		v, err := w.begin().Alter(w.id(a.word(0)), how, AlterTo{Arg: arg})
		w.verdict([...]string{"set-priority", "set-run-at", "redrive", "purge", "cancel", "forget"}[how], a, v, err)
	}
}

// redriveAll redrives many dead letters, in as many groups as necessary.
func (w *world) redriveAll(a args, _ []string) {
	b := BulkAlteration{How: AlterRedrive, States: record.SetOf(Dead)}
	for _, name := range a.plain {
		b.IDs = append(b.IDs, w.id(name))
	}
	for {
		v, err := w.begin().AlterMany(&b)
		if v != Again {
			w.printf("%d of %d redriven%s", b.N, len(b.IDs), maybe(": ", err))
			return
		}
		w.printf("%d redriven, again", b.N)
		w.commit(w.s())
	}
}

// bulk alters many tasks in some states, in as many groups as necessary.
func (w *world) bulk(a args, words []string) {
	b := BulkAlteration{AlterTo: AlterTo{Arg: uint64(a.number("to", 0)), Queue: a.named["queue"]}}
	b.How = map[string]Alteration{
		"cancel": AlterCancel, "redrive": AlterRedrive, "forget": AlterForget, "move": AlterMove, "set-priority": AlterPriority,
	}[a.word(0)]
	for state := Ready; state <= Canceled; state++ {
		if states := a.named["states"]; states == "" || slices.Contains(strings.Split(states, ","), state.String()) {
			b.States |= record.SetOf(state)
		}
	}
	for _, name := range a.plain[1:] {
		b.IDs = append(b.IDs, w.id(name))
	}
	for {
		v, err := w.begin().AlterMany(&b)
		if v != Again {
			w.printf("%d of %d, %d refused%s", b.N, len(b.IDs), b.Failed, maybe(": ", err))
			w.nameNew(w.s())
			return
		}
		w.printf("%d, again", b.N)
		w.commit(w.s())
	}
}

// configure sets a queue, or takes over the settings of another shard. Without a version it takes
// the next one.
func (w *world) configure(a args, adopt bool) {
	s, queue := w.begin(), a.word(0)
	set := record.Settings{
		Paused: a.has("paused"), ConcurrencyPerKey: a.number("concurrency-per-key", 0), HoldGroups: a.has("hold-groups"),
		Policy: record.Policy{Retention: a.span("retention", 0)}, DeadRetention: a.span("dead-retention", 0),
	}
	for tenant := range strings.SplitSeq(a.named["weights"], ",") {
		if name, n, ok := strings.Cut(tenant, ":"); ok {
			if set.TenantWeights == nil {
				set.TenantWeights = make(map[string]int)
			}
			set.TenantWeights[name] = int(n[0] - '0')
		}
	}
	version := 1
	if q := s.Names.Queues[queue]; q != nil {
		version = int(q.Version) + 1
	}
	text, err := json.Marshal(set)
	require.NoError(w.t, err)
	value := keys.SettingsValue{Version: uint64(a.number("version", version)), JSON: text}.Append(nil)
	if adopt {
		w.verdict("adopt", a, Decided, s.Names.Adopt(queue, value))
		return
	}
	late, err := s.Configure(queue, value)
	if late {
		err = errors.New("late")
	}
	w.verdict("configure", a, Decided, err)
}

func (w *world) schedule(a args, _ []string) {
	payload := a.word(0)
	v := keys.ScheduleValue{
		Queue: a.named["queue"], Every: uint64(a.span("every", 0).Milliseconds()),
		Cron:   strings.ReplaceAll(a.named["cron"], "_", " "),
		Missed: uint8(max(0, slices.Index([]string{"once", "skip", "all"}, a.named["missed"]))),
		Record: (&record.Record{Payload: []byte(payload)}).Encode(),
	}
	times, err := recurrence.Of(&v)
	if err == nil {
		err = w.begin().Times.SetSchedule(a.word(0), v, times)
	}
	w.verdict("schedule", a, Decided, err)
}

// take makes the shard take the messages under way to it.
func (w *world) take(args, []string) {
	w.driver.take(w.s(), func(n int, p *delivery, from int) {
		w.printf("takes %d of %d of shard %d", n, len(p.Messages), from)
	})
}

// deliver does upkeep and delivers messages, in all shards, until nothing is left.
func (w *world) deliver(args, []string) {
	at := w.at
	for busy := true; busy; {
		busy = false
		for w.at = range w.shards {
			s := w.s()
			require.False(w.t, s.under, "deliver comes after a commit")
			before := w.out.Len()
			busy = w.keepUp() > 0 || busy
			w.take(args{}, nil)
			w.confirm(w.s())
			if s.under {
				busy = true
				w.commit(s)
			}
			if said := w.out.String(); len(w.shards) > 1 && len(said) > before {
				w.out.Reset()
				w.out.WriteString(said[:before])
				for line := range strings.Lines(said[before:]) {
					fmt.Fprintf(&w.out, "%d: %s", w.at, line)
				}
			}
		}
	}
	w.at = at
}

// effects prints the work for the owner that a commit does not print.
func (w *world) effects(args, []string) {
	e := &w.s().Effects
	print := func(what string, queues []*Queue) {
		var names []string
		for _, q := range queues {
			names = append(names, q.Name)
		}
		if len(names) > 0 {
			w.printf("%s: %s", what, strings.Join(names, " "))
		}
	}
	print("fed", e.Fed)
	print("shown", e.Shown)
	print("freed", e.Freed)
	for _, r := range e.Configured {
		w.printf("configured: %s, version %d", r.Queue.Name, r.Queue.Version)
	}
}

// next prints the next reasons for the owner to wake up.
func (w *world) next(args, []string) {
	s := w.s()
	uptime, lease, wall := s.NextDue()
	if wall != Never {
		w.printf("next at %s by the wall clock", clock(wall))
	}
	if lease != Never {
		w.printf("looks at leases in %s", brief(int64(lease)-int64(w.Now)))
	}
	if uptime != Never {
		w.printf("next trim in %s", brief(int64(uptime)-int64(w.Uptime)))
	}
}

// memory prints the part of the catalogue that is in memory.
func (w *world) memory(args, []string) {
	s := w.s()
	c := &s.Names.catalogue
	w.printf("%d of %d lanes and %d of %d queues are in memory", c.loaded.Len(), c.lanes.Len(), c.current.Len(), c.queues.Len()-1)
	for _, l := range s.Names.lanes.All() {
		if l != nil {
			u := s.Names.ready.Usage(&l.tasks)
			w.printf("  queue %s%s%s: window of %d, complete %t", l.queue.Name, maybe(" tenant ", l.Tenant), maybe(" priority ", l.Priority), u.Held, u.Complete)
		}
	}
}

func (w *world) outcomeOf(a args, _ []string) {
	id := w.id(a.word(0))
	switch o, v, err := w.begin().Outcome(id, true); {
	case o != nil:
		w.printf("%s", w.outcome(id, o))
	case v != Decided || err != nil:
		w.verdict("outcome", a, v, err)
	default:
		w.printf("%s has not ended", a.word(0))
	}
}

// first prints the task that a claim would get, as far as memory shows.
func (w *world) first(a args, _ []string) {
	f, ok := FirstTask{}, false
	if q := w.s().Names.Queues[a.named["queue"]]; q != nil {
		f, ok = w.s().Names.First(q)
	}
	if !ok {
		w.printf("nothing")
		return
	}
	w.printf("priority %d%s, alone %t", f.Priority, maybe(", tenant ", f.Tenant), f.Alone)
}

func (w *world) idle(a args, _ []string) {
	w.printf("idle: %t", w.s().Idle(&Idleness{Queues: a.plain}))
}

// totals prints the counts of the events of a queue's tasks, in all and by day.
func (w *world) totals(a args, _ []string) {
	s, names := w.s(), []string{"", "produced", "claimed", "completed", "retried", "released", "dead", "canceled", "expired", "unhandled"}
	text := func(t *keys.Totals) (text string) {
		for kind, n := range t {
			if n > 0 {
				text += fmt.Sprintf(" %d %s", n, names[kind+1])
			}
		}
		return text
	}
	s.Update(Start{Instant: w.Instant, Format: s.Format, Room: s.Room, Tight: s.Tight, Wanted: s.Wanted})
	of := s.Names.TotalsOf([]string{a.word(0)}, nil)
	days, v := s.Names.DaysOf(a.word(0), nil)
	require.NoError(w.t, s.Broken)
	require.Equal(w.t, Decided, v)
	w.printf("queue %s:%s", a.word(0), text(&of[0].Totals))
	for i := range days {
		w.printf("  day %d:%s", days[i].Day-uint32(storyStart/dayMillis), text(&days[i].OfDay))
	}
}

// sweep reads the entries that a sweep of the catalogue asks for.
func (w *world) sweep(args, []string) {
	s := w.s()
	sw := s.Effects.Sweep
	require.NotNil(w.t, sw, "no sweep is under way")
	s.Effects.Sweep = nil
	s.Names.Swept(sw, sw.Names.Read(s.Store.DB(), func() bool { return false }))
}

// note gives a lease the notes of its handler.
func (w *world) note(a args, _ []string) {
	n := &record.Notes{Done: int64(a.number("done", 0)), Total: int64(a.number("total", 0)), Text: a.named["text"], At: w.Wall}
	for k, v := range a.named {
		if k, ok := strings.CutPrefix(k, "meta-"); ok {
			n.Metadata = map[string]string{k: v}
		}
	}
	w.verdict("note", a, Decided, w.beginAt(a).Leases.Note(w.lease(a), n))
}

// history prints the known attempts of a task, and the notes of its handlers.
func (w *world) history(a args, _ []string) {
	s := w.s()
	require.False(w.t, s.under, "history comes after a commit")
	id := w.id(a.word(0))
	view := store.NewSnapshot(s.Store.DB())
	view.Leases = make(map[keys.ID]store.Lease)
	if l, ok := s.Leases.LeaseOf(id); ok {
		view.Leases[id] = l
	}
	t, err := view.Get(id)
	require.NoError(w.t, err)
	h, notes := t.Record.History, t.Record.Notes
	if h == nil {
		w.printf("no history")
	} else {
		w.printf("first ready %s", maybe("at ", clockIf(h.FirstReady)))
		for i, e := range h.Attempts {
			if i == record.AttemptsKeptFirst && h.Dropped > 0 {
				w.printf("  %d left out", h.Dropped)
			}
			w.printf("  %d %s, %s to %s%s%s", e.Number, eventNames[e.How], clock(e.Start), clock(e.End), maybe(", worker ", e.Worker), maybe(", error ", e.Error))
		}
	}
	if l := t.Lease; l != nil {
		w.printf("  %d goes on since %s%s", l.Attempts, clock(keys.GrantedAt(l.Token)), maybe(", worker ", l.Worker))
		if l.Notes != nil {
			notes = l.Notes
		}
	}
	if n := notes; n != nil {
		w.printf("  says %d of %d at %s: %s %v", n.Done, n.Total, clock(n.At), n.Text, n.Metadata)
	}
}

// clockIf prints a time of the wall clock, if there is one.
func clockIf(ms uint64) string {
	if ms == 0 {
		return ""
	}
	return clock(ms)
}
