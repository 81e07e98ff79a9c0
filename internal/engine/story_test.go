package engine

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
	"codeq/internal/store"
)

// Stories drive States without an owner, a command at a time. A file of testdata is one story:
// blocks of commands, a line of dashes, and their output; storyCommands lists the commands. A story
// names tasks by the names from their produce command, and gives times as durations since its
// beginning. A group takes all commands until a commit; "upkeep" does the due work, in its own
// groups.

var rewrite = flag.Bool("rewrite", false, "write what stories print into their files")

// TestStories: each story prints the output in its file, for each seed.
func TestStories(t *testing.T) {
	shared := store.NewCaches(8<<20, 1<<20, 8)
	defer shared.Close()
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			printed := play(t, shared, string(text), 1)
			require.Equal(t, printed, play(t, shared, string(text), 1), "played again")
			require.Equal(t, printed, play(t, shared, string(text), 2), "another seed")
			if *rewrite {
				require.NoError(t, os.WriteFile(file, []byte(printed), 0o644))
				return
			}
			require.Equal(t, string(text), printed)
		})
	}
}

// play returns the text of a story with the output of its commands.
func play(t *testing.T, shared *store.Caches, text string, seed byte) string {
	w := &world{driver: driver{t: t, shared: shared, seed: seed}}
	defer func() { w.close() }()
	var out strings.Builder
	for _, block := range strings.Split(strings.TrimSpace(text), "\n\n") {
		commands, _, found := strings.Cut(block, "\n----")
		out.WriteString(commands)
		if found {
			out.WriteString("\n----\n")
			w.out.Reset()
			for line := range strings.SplitSeq(commands, "\n") {
				if !strings.HasPrefix(line, "#") {
					w.run(line)
				}
			}
			out.WriteString(cmp.Or(strings.TrimSpace(w.anonymous(w.out.String())), "ok"))
		}
		out.WriteString("\n\n")
	}
	w.finish()
	return strings.TrimSuffix(out.String(), "\n")
}

// world has the shards of a story.
type world struct {
	driver
	at      int                // the shard of the next commands
	names   map[keys.ID]string // of tasks
	ids     map[string]keys.ID
	fresh   map[keys.ID]*drivenShard // tasks named in groups under way
	leases  map[string]Receipt       // by name of the task, or of the lease
	granted map[Receipt]*drivenShard // in groups under way
	scopes  map[uint64]string
	uniq    map[[keys.UniqueLen]byte]string
	known   uint64 // ms: for how long the last process has known the clock of leases
	out     strings.Builder
}

// storyStart is the wall clock at the beginning of a story, ms.
var storyStart = uint64(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).UnixMilli())

func (w *world) printf(format string, args ...any) { fmt.Fprintf(&w.out, format+"\n", args...) }

func (w *world) s() *drivenShard { return w.shards[w.at] }

// args are the words of a command: some are name=value.
type args struct {
	w     *world
	plain []string
	named map[string]string
}

func (w *world) args(words []string) args {
	a := args{w, nil, make(map[string]string)}
	for _, word := range words {
		if k, v, ok := strings.Cut(word, "="); ok {
			a.named[k] = v
		} else {
			a.plain = append(a.plain, word)
		}
	}
	return a
}

func (a args) word(n int) string {
	require.Less(a.w.t, n, len(a.plain), "a word is missing")
	return a.plain[n]
}

func (a args) has(word string) bool { return slices.Contains(a.plain, word) }

func (a args) number(name string, otherwise int) int {
	if a.named[name] == "" {
		return otherwise
	}
	n, err := strconv.Atoi(a.named[name])
	require.NoError(a.w.t, err)
	return n
}

// span is a duration; "forever" is negative.
func (a args) span(name string, otherwise time.Duration) time.Duration {
	if a.named[name] == "" {
		return otherwise
	}
	return a.w.span(a.named[name])
}

func (w *world) span(text string) time.Duration {
	if text == "forever" {
		return -1
	}
	d, err := time.ParseDuration(text)
	require.NoError(w.t, err)
	return d
}

// moment is a time of the wall clock; stories write it as a duration since their beginning.
func (a args) moment(name string) uint64 {
	if a.named[name] == "" {
		return 0
	}
	return storyStart + uint64(a.w.span(a.named[name]).Milliseconds())
}

// clock prints a time of the wall clock.
func clock(ms uint64) string {
	if ms >= keys.Forever {
		return "forever"
	}
	if d := brief(int64(ms - storyStart)); d[0] == '-' {
		return d
	}
	return "+" + brief(int64(ms-storyStart))
}

func brief(ms int64) string {
	s := (time.Duration(ms) * time.Millisecond).String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return s
}

var tokens = regexp.MustCompile(`\.[0-9a-f]{16}\b`)

// anonymous replaces IDs by the names of the tasks.
func (w *world) anonymous(text string) string {
	for id, name := range w.names {
		text = strings.ReplaceAll(text, keys.FormatID(id), name)
	}
	return tokens.ReplaceAllString(text, "")
}

func (w *world) run(line string) {
	words := strings.Fields(line)
	command := storyCommands[words[0]]
	require.NotNil(w.t, command, "%s: no such command", line)
	if words[0] != "open" {
		require.NotEmpty(w.t, w.shards, "a story begins with open")
	}
	command(w, w.args(words[1:]), words[1:])
	for n, s := range w.shards {
		require.NoError(w.t, s.Broken, "%s: shard %d", line, n)
	}
}

func (w *world) open(a args) {
	w.close()
	*w = world{
		driver: driver{
			t: w.t, shared: w.shared, seed: w.seed, slow: a.span("slow", 0), Instant: Instant{Wall: storyStart},
			sealing: w.nameNew, persisted: w.told, kept: w.keptUp, forgotten: func(q *Queue) { w.printf("queue %s leaves memory", q.Name) },
			clockAge: func(int) uint64 { return w.known },
			config: Config{
				Shards: a.number("shards", 1), Replicated: a.has("replicated"),
				WindowTasks: a.number("window-tasks", 1000), WindowBytes: a.number("window-bytes", 1<<20),
				MaxAttempts: a.number("max-attempts", 3), SuspectFor: 60_000, Retention: a.span("retention", 0),
				Backoff:   func(attempt int, _ float64) time.Duration { return time.Duration(attempt) * 10 * time.Second },
				IdleLanes: a.number("idle-lanes", IdleLanes), SweepLanes: a.number("sweep-lanes", SweepLanes),
				GroupBytes: a.number("group-bytes", GroupBytes), TrimBytes: a.number("trim-bytes", TrimBytes), TrimLane: a.number("trim-lane", TrimLane),
			},
		},
		names: make(map[keys.ID]string), ids: make(map[string]keys.ID), fresh: make(map[keys.ID]*drivenShard),
		leases: make(map[string]Receipt), granted: make(map[Receipt]*drivenShard), scopes: make(map[uint64]string), uniq: make(map[[keys.UniqueLen]byte]string),
	}
	w.driver.open()
}

// crash loads the committed data. The monotonic clock begins anew. The new process is the one of
// the next leader. known: for how long it has known the clock of leases; replicated: from now on it
// belongs to a cluster; killed: the process before it has died.
func (w *world) crash(a args, _ []string) {
	w.known = uint64(a.span("known", 0).Milliseconds())
	w.config.Replicated = w.config.Replicated || a.has("replicated")
	w.killed = a.has("killed")
	for id := range w.fresh {
		delete(w.ids, w.names[id])
		delete(w.names, id)
	}
	clear(w.fresh)
	clear(w.granted)
	for _, r := range w.driver.crash() {
		w.printf("schedule %s rests", r.Name)
	}
}

// begin begins a group of the current shard.
func (w *world) begin() *drivenShard {
	w.driver.begin(w.s())
	return w.s()
}

// commit persists the group, and checks the shard.
func (w *world) commit(s *drivenShard) {
	w.driver.commit(s)
	w.check(s)
}

func (w *world) check(s *drivenShard) { require.NoError(w.t, w.driver.check(s)) }

// told prints the events, messages and other reports of a group.
func (w *world) told(s *drivenShard) {
	w.nameNew(s)
	e := &s.Effects
	if s.Group.Trimmed {
		w.printf("deletes what is consumed by range")
	}
	for _, ev := range e.Events {
		if n := ev.Progress; n != nil {
			w.printf("event progress %s attempt %d: %d of %d, %s", w.name(ev.ID), ev.Attempt, n.Done, n.Total, n.Text)
			continue
		}
		w.printf("event %s %s%s%s", eventNames[ev.Kind], w.name(ev.ID), maybe(" attempt ", ev.Attempt), maybe(": ", ev.LastError))
	}
	for _, end := range e.Endings {
		w.printf("ended %s", w.outcome(end.ID, &end.Outcome))
	}
	for _, r := range e.Canceled {
		w.printf("the lease of %s is canceled", w.name(r.ID))
	}
	for _, p := range e.Outgoing {
		for n := range p.Messages {
			w.printf("sends %d to shard %d: %s", p.First+uint64(n), p.To, w.message(&p.Messages[n]))
		}
	}
	if s := e.Suspects; s.Passed+s.Freed > 0 || s.Anew {
		w.printf("suspects: %d passed, %d freed%s", s.Passed, s.Freed, maybe(", anew: ", s.Anew))
	}
	if s := e.Suspects; s.Beside+s.Apart > 0 {
		w.printf("suspects come after %d more, and not after %d any more", s.Beside, s.Apart)
	}
	maps.DeleteFunc(w.fresh, func(_ keys.ID, by *drivenShard) bool { return by == s })
	maps.DeleteFunc(w.granted, func(_ Receipt, by *drivenShard) bool { return by == s })
}

// finish ends a story: it does the due work, and checks all shards.
func (w *world) finish() {
	for w.at = range w.shards {
		s := w.s()
		if s.Room = Roomy; s.under {
			w.commit(s)
		}
		w.keepUp()
		require.True(w.t, s.isAtRest(), "shard %d does not come to rest", w.at)
		w.check(s)
	}
}

// stepNames are the names of the steps of upkeep.
var stepNames = [...]string{"trim", "list", "promote", "free keys", "forget", "wake", "tell", "recheck", "send", "reap", "tick", "tidy"}

// keepUp does the due work, in as many groups as necessary.
func (w *world) keepUp() (groups int) { return w.driver.keepUp(w.s()) }

func (w *world) keptUp(_ *drivenShard, steps []upkeepDone) {
	var names []string
	for _, step := range steps {
		names = append(names, stepNames[step.UpkeepKind])
	}
	w.printf("upkeep: %s", cmp.Or(strings.Join(names, ", "), "refill"))
}

// maybe prints a value unless it is zero.
func maybe[T comparable](before string, v T) string {
	if v == *new(T) {
		return ""
	}
	return fmt.Sprint(before, v)
}

func (w *world) outcome(id keys.ID, o *Outcome) string {
	return fmt.Sprintf("%s %v%s%s%s", w.name(id), o.State, maybe(", attempts ", o.Attempts), maybe(", result ", string(o.Result)), maybe(", error ", o.LastError))
}

var eventNames = [...]string{
	EventProduced: "produced", EventClaimed: "claimed", EventCompleted: "completed", EventRetried: "retried", EventReleased: "released",
	EventDeadLettered: "dead-lettered", EventCanceled: "canceled", EventExpired: "expired",
	eventSuspended: "suspended", eventUnhandled: "unhandled",
}

func (w *world) message(m *keys.Message) string {
	switch m.Kind {
	case keys.MsgFlow:
		var tasks []string
		for _, t := range m.Tasks {
			rec, err := record.Decode(t.Record)
			require.NoError(w.t, err)
			tasks = append(tasks, fmt.Sprintf("%s in queue %s", rec.Payload, t.Queue))
		}
		return "produce " + strings.Join(tasks, ", ")
	case keys.MsgTicked:
		return fmt.Sprintf("schedule %s has produced the task of its tick", m.Schedule)
	case keys.MsgAdmit, keys.MsgFollow, keys.MsgTick:
		rec, err := record.Decode(m.Record)
		require.NoError(w.t, err)
		return fmt.Sprintf("produce %s in queue %s", rec.Payload, m.Queue)
	case keys.MsgDepend:
		return fmt.Sprintf("%s waits for %s", w.name(m.Child), w.name(m.Parent))
	case keys.MsgEnded:
		how := [...]string{keys.ParentDone: "done", keys.ParentCanceled: "canceled", keys.ParentPinned: "done and pinned"}[m.Outcome]
		return fmt.Sprintf("%s is %s for %s", w.name(m.Parent), how, w.name(m.Child))
	case keys.MsgSettings:
		v, err := keys.ParseSettings(m.Settings)
		require.NoError(w.t, err)
		return fmt.Sprintf("settings of queue %s, version %d", m.Queue, v.Version)
	case keys.MsgUnpin:
		return fmt.Sprintf("one pin less keeps %s", w.name(m.Parent))
	default:
		return fmt.Sprintf("%s needs its parents no more", w.name(m.Child))
	}
}

// name returns the name of a task.
func (w *world) name(id keys.ID) string {
	if name := w.names[id]; name != "" {
		return name
	}
	return "a task without a name"
}

// id returns the ID of a task. REQUIRES: the task has been committed: before, no caller has its ID.
func (w *world) id(name string) keys.ID {
	id, ok := w.ids[name]
	require.True(w.t, ok, "nothing is called %q", name)
	require.Nil(w.t, w.fresh[id], "nobody knows of %q before the commit", name)
	return id
}

// setName names a task of the group of a shard.
func (w *world) setName(s *drivenShard, id keys.ID, name string) {
	w.names[id], w.ids[name], w.fresh[id] = name, id, s
}

// nameNew names the tasks that no produce has named, by their payloads.
func (w *world) nameNew(s *drivenShard) {
	note := func(id keys.ID, b []byte) {
		rec, err := record.Decode(b)
		require.NoError(w.t, err)
		if w.names[id] != "" {
			return
		}
		name := string(rec.Payload)
		if tick := rec.Headers[recurrence.TickHeader]; tick != "" {
			at, err := time.Parse(recurrence.Format, tick)
			require.NoError(w.t, err)
			name += "@" + clock(uint64(at.UnixMilli()))
		}
		for n, first := 2, name; w.ids[name] != (keys.ID{}); n++ {
			name = fmt.Sprint(first, "#", n)
		}
		w.setName(s, id, name)
	}
	for i := range s.Group.tasks.Len() {
		if id, rec := s.Group.tasks.At(i); rec != nil {
			note(id, rec)
		}
	}
	for b := s.Group.Batch.Reader(); ; { // tasks that do not begin as ready
		kind, key, value, ok, err := b.Next()
		require.NoError(w.t, err)
		if !ok {
			return
		}
		if kind != pebble.InternalKeyKindSet || key[0] != keys.Scheduled && key[0] != keys.Blocked && key[0] != keys.Task {
			continue
		}
		id, place, err := keys.ParsePlaceKey(key)
		require.NoError(w.t, err)
		_, rec, _, err := store.SplitValue(place, value)
		require.NoError(w.t, err)
		note(id, rec)
	}
}

// eachTask visits all tasks on disk.
func (w *world) eachTask(s *drivenShard, visit func(keys.ID, keys.Place, LaneKey, []byte, keys.EndedValue)) {
	for _, prefix := range []byte{keys.Task, keys.Scheduled, keys.Blocked, keys.Dead, keys.Done, keys.Canceled} {
		w.scan(s, prefix, func(key, value []byte) {
			id, place, err := keys.ParsePlaceKey(key)
			require.NoError(w.t, err)
			lane, rec, ended, err := store.SplitValue(place, value)
			require.NoError(w.t, err)
			if prefix == keys.Task {
				lane = place.Group
			}
			k, err := s.Names.laneEntry(lane)
			require.NoError(w.t, err)
			visit(id, place, k, rec, ended)
		})
	}
}

func (w *world) scan(s *drivenShard, prefix byte, visit func(key, value []byte)) {
	require.NoError(w.t, store.Scan(s.Store.DB(), prefix, func(key, value []byte) error {
		visit(key, value)
		return nil
	}))
}

// readyLine is a lane as a story shows it.
type readyLine struct {
	LaneKey
	tasks []string
}

// state prints the tasks on disk, and the leases and windows in memory; only those of a queue if
// the command names one.
func (w *world) state(a args, _ []string) {
	s := w.s()
	require.False(w.t, s.under, "state comes after a commit")
	lines := make(map[string][]string) // by queue
	var lanes []*readyLine
	w.eachTask(s, func(id keys.ID, p keys.Place, k LaneKey, b []byte, ended keys.EndedValue) {
		rec, err := record.Decode(b)
		require.NoError(w.t, err)
		name := w.name(id)
		if s.Leases.byID[id] != nil {
			return
		}
		if rec.Attempts > 0 {
			name += fmt.Sprintf(" after %d", rec.Attempts)
		}
		if rec.Suspect {
			name += " (suspect)"
		}
		var line string
		switch p.Range {
		case keys.Task:
			n := slices.IndexFunc(lanes, func(l *readyLine) bool { return l.LaneKey == k })
			if n < 0 {
				n = len(lanes)
				lanes = append(lanes, &readyLine{LaneKey: k})
			}
			lanes[n].tasks = append(lanes[n].tasks, name)
			return
		case keys.Scheduled:
			line = fmt.Sprintf("scheduled %s at %s", name, clock(p.At))
		case keys.Blocked:
			by := w.scopes[p.At]
			if keys.IsSuspectScope(p.At) {
				by = fmt.Sprintf("its start, crashes %d", rec.Crashes)
			}
			for i, parent := range rec.Parents {
				if p.At == 0 && !slices.Contains(rec.Parents[:i], parent) {
					by += " " + w.name(parent)
				}
			}
			line = fmt.Sprintf("blocked %s by %s", name, strings.TrimSpace(by))
		default:
			line = fmt.Sprintf("%v %s until %s", StateIn(p.Range), name, clock(p.At)) + maybe(", result ", string(ended.Result))
			if rec.HoldsTurn {
				line += ", has the turn"
			}
		}
		lines[k.Queue] = append(lines[k.Queue], line+maybe(", error ", rec.Error))
	})
	for id, ls := range s.Leases.byID {
		line := fmt.Sprintf("leased %s attempt %d, %s left", w.name(id), ls.attempts, brief(int64(ls.expiry.Deadline())-int64(w.Now)))
		if ls.local {
			line += ", local"
		}
		lines[ls.lane.queue.Name] = append(lines[ls.lane.queue.Name], line)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Names.Queues)) {
		q := s.Names.Queues[name]
		c := q.Counts
		if a.named["queue"] != "" && a.named["queue"] != name {
			continue
		}
		var counts []string
		for i, n := range []uint64{c.Ready, c.Scheduled, c.Blocked, c.Leased, c.Dead, c.Done, c.Canceled} {
			if n > 0 {
				counts = append(counts, fmt.Sprintf("%d %v", n, TaskState(i+1)))
			}
		}
		w.printf("queue %s: %s", name, cmp.Or(strings.Join(counts, ", "), "empty"))
		if q.Version > 0 {
			w.printf("  settings %d %s", q.Version, q.Value[8:])
		}
		slices.SortStableFunc(lanes, func(a, b *readyLine) int {
			return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.Tenant, b.Tenant))
		})
		for _, l := range lanes {
			if l.Queue != name {
				continue
			}
			memory := ""
			if in := q.lane(l.Tenant, l.Priority); in == nil || w.s().Names.ready.Usage(&in.tasks).Held < len(l.tasks) {
				memory = " (not all in memory)"
			}
			w.printf("  ready%s%s: %s%s", maybe(" tenant ", l.Tenant), maybe(" priority ", l.Priority), strings.Join(l.tasks, " "), memory)
		}
		slices.Sort(lines[name])
		for _, line := range lines[name] {
			w.printf("  %s", line)
		}
	}
	if a.named["queue"] == "" {
		w.bindings(s)
	}
}

// bindings prints what binds tasks to others, schedules, and messages.
func (w *world) bindings(s *drivenShard) {
	var lines []string
	show := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	flush := func() {
		slices.Sort(lines)
		for _, line := range lines {
			w.printf("%s", line)
		}
		lines = nil
	}
	each := func(prefix byte, visit func(key, value []byte)) { w.scan(s, prefix, visit); flush() }
	each(keys.Group, func(key, value []byte) {
		scope, err1 := keys.ParseScope(key)
		v, err2 := keys.ParseGroup(value)
		require.NoError(w.t, errors.Join(err1, err2))
		turn := "nobody yet"
		if v.Holder != (keys.ID{}) {
			turn = w.name(v.Holder)
		}
		if v.Waiting {
			turn += ", others wait"
		}
		show("%s: turn of %s", w.scopes[scope], turn)
	})
	for scope, st := range s.Ties.limits {
		line := fmt.Sprintf("%s: %d leased", w.scopes[scope], st.leased)
		if st.parked {
			line += ", others may wait"
		}
		show("%s", line)
	}
	flush()
	each(keys.Unique, func(key, value []byte) {
		hash, err1 := keys.ParseHashed(key)
		v, err2 := keys.ParseUnique(value)
		require.NoError(w.t, errors.Join(err1, err2))
		line := fmt.Sprintf("key %s: taken by %s", w.uniq[hash], w.name(v.ID))
		if v.Until != 0 {
			line += " until " + clock(v.Until)
		}
		show("%s", line)
	})
	each(keys.Dependent, func(key, value []byte) {
		parent, child, err := keys.ParseDependent(key)
		require.NoError(w.t, err)
		show("%s waits for %s, on dead %s", w.name(child), w.name(parent), [...]string{"hold", "cancel", "run"}[value[0]])
	})
	each(keys.Telling, func(key, value []byte) {
		parent, _, err := keys.ParseTelling(key, value)
		require.NoError(w.t, err)
		show("not all know of the end of %s", w.name(parent))
	})
	each(keys.Pinned, func(key, value []byte) {
		id, err1 := keys.ParseByID(key)
		v, err2 := keys.ParsePinned(value)
		require.NoError(w.t, errors.Join(err1, err2))
		show("%s is pinned %d times, and kept until %s then", w.name(id), v.Count, clock(v.Until))
	})
	each(keys.Wake, func(key, value []byte) {
		_, scope, id, err := keys.ParseGrouped(key)
		require.NoError(w.t, err)
		show("wakeup: %s", cmp.Or(w.scopes[scope], w.names[id]))
	})
	s.Times.Schedules("", func(i *recurrence.Schedule) bool {
		last := ""
		if i.Value.Last != 0 {
			last = ", last " + clock(i.Value.Last)
		}
		w.printf("schedule %s: next %s%s", i.Name, clock(i.Next), last)
		return true
	})
	each(keys.Outbound, func(key, value []byte) {
		to, seq, err1 := keys.ParseOutbound(key)
		m, err2 := keys.ParseMessage(slices.Clone(value))
		require.NoError(w.t, errors.Join(err1, err2))
		show("message %d to shard %d: %s", seq, to, w.message(&m))
	})
}
