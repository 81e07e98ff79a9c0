package call

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// The tasks of a batch: their shards, the twins with the same idempotency key, the tasks that wait
// for each other, and the size of their commit.

// BatchPart is the tasks of a batch that one shard stores in one commit.
type BatchPart struct {
	Shard int
	Tasks []int // indexes, in ascending order; nil: all of the batch
	level int   // more than the levels of the parts that it waits for
	again bool  // some of them would be stored again if the batch were
}

// SplitBatch divides a batch into parts: nil means that any shard may store all tasks. A part comes
// after those that it waits for. Among the others, those come first that a repeated batch would not
// store again. REQUIRES: the twins are found; they are in the same part.
func SplitBatch(tasks []engine.NewTask, shards int) []BatchPart {
	first := slices.IndexFunc(tasks, func(t engine.NewTask) bool {
		_, bound := t.Home(shards)
		return bound
	})
	if first < 0 {
		return nil
	}
	base, _ := tasks[first].Home(shards)
	waited := waitedFor(tasks)
	var parts []BatchPart
	in := make([]int, len(tasks)) // the index of the part
	var free []int
	for i := range tasks {
		t := &tasks[i]
		if t.Tied != nil && t.Tied.Twin >= 0 {
			in[i] = in[t.Tied.Twin]
			parts[in[i]].Tasks = append(parts[in[i]].Tasks, i)
			continue
		}
		home, bound := t.Home(shards)
		siblings := siblingsOf(tasks, i)
		switch {
		case bound:
		case len(siblings) > 0: // with one of those that are stored last
			last := slices.MaxFunc(siblings, func(a, b int) int { return cmp.Compare(parts[in[a]].level, parts[in[b]].level) })
			home = parts[in[last]].Shard
		case waited[i]:
			home = base
		default:
			free = append(free, i)
			continue
		}
		level := 0
		for _, n := range siblings {
			p := &parts[in[n]]
			if level = max(level, p.level); p.Shard != home {
				level = max(level, p.level+1)
			}
		}
		n := slices.IndexFunc(parts, func(p BatchPart) bool { return p.Shard == home && p.level == level })
		if n < 0 {
			n = len(parts)
			parts = append(parts, BatchPart{Shard: home, level: level})
		}
		in[i] = n
		parts[n].Tasks = append(parts[n].Tasks, i)
		parts[n].again = parts[n].again || t.Tied == nil || t.Tied.Unique == [keys.UniqueLen]byte{}
	}
	slices.SortStableFunc(parts, func(a, b BatchPart) int {
		switch {
		case a.level != b.level || a.again == b.again:
			return cmp.Compare(a.level, b.level)
		case a.again:
			return 1
		}
		return -1
	})
	last := &parts[len(parts)-1]
	last.Tasks = append(last.Tasks, free...)
	slices.Sort(last.Tasks)
	return parts
}

// Append appends the tasks of the part. For siblings outside it stand the IDs of those that
// are stored.
func (p *BatchPart) Append(into, all []engine.NewTask, stored func(i int) keys.ID) []engine.NewTask {
	for _, i := range p.Tasks {
		t := all[i]
		if refersToSiblings(t) {
			rec := decoded(&t)
			parents := rec.Parents[:0]
			for _, id := range rec.Parents {
				if n, sibling := keys.NthOf(id); sibling {
					if at, mine := slices.BinarySearch(p.Tasks, n); mine {
						id = keys.Nth(at)
					} else if id = stored(n); id == (keys.ID{}) {
						continue // of a twin, which is not stored
					}
				}
				parents = append(parents, id)
			}
			rec.Parents = parents
			t.Encode(&rec, nil)
		}
		into = append(into, t)
	}
	findTwins(into)
	return into
}

// At returns the index in the batch of the part's i-th task.
func (p *BatchPart) At(i int) int {
	if p.Tasks == nil {
		return i
	}
	return p.Tasks[i]
}

// BatchErrors are the errors of the N tasks of a batch, by index.
type BatchErrors struct {
	N    int
	Errs []error // nil: no task has failed
}

// Set sets the error of a task, unless it has one.
func (e *BatchErrors) Set(task int, err error) {
	if e.Errs == nil {
		e.Errs = make([]error, e.N)
	}
	if e.Errs[task] == nil {
		e.Errs[task] = err
	}
}

// Fail sets the error of all tasks of parts.
func (e *BatchErrors) Fail(parts []BatchPart, err error) {
	for i := range parts {
		n := len(parts[i].Tasks)
		if parts[i].Tasks == nil {
			n = e.N
		}
		for task := range n {
			e.Set(parts[i].At(task), err)
		}
	}
}

// siblingsOf returns the tasks of its batch that a task waits for, in the order of its parents. One
// that is not stored is its twin.
func siblingsOf(tasks []engine.NewTask, i int) (siblings []int) {
	if tasks[i].Tied == nil {
		return nil
	}
	for _, p := range tasks[i].Tied.Parents {
		n, ok := keys.NthOf(p)
		if !ok {
			continue
		}
		if t := tasks[n].Tied; t != nil && t.Twin >= 0 {
			n = t.Twin
		}
		siblings = append(siblings, n)
	}
	return siblings
}

// waitedFor returns the tasks that others of the batch wait for.
func waitedFor(tasks []engine.NewTask) map[int]bool {
	var waited map[int]bool
	for i := range tasks {
		for _, n := range siblingsOf(tasks, i) {
			if waited == nil {
				waited = make(map[int]bool)
			}
			waited[n] = true
		}
	}
	return waited
}

// refersToSiblings reports whether a task waits for others of its batch.
func refersToSiblings(t engine.NewTask) bool {
	return t.Tied != nil && slices.ContainsFunc(t.Tied.Parents, func(p keys.ID) bool { _, ok := keys.NthOf(p); return ok })
}

// route is where the tasks of a batch are stored that is given to one shard, as the rules decide it
// (admitAll).
type route struct {
	at   []int      // the shard of each task
	hops []BatchHop // of tasks that are sent together, because some of them wait for others
}

// routeOf finds the route of a batch. Each hop writes the tasks that are not stored yet; the error
// is that these are more than limit bytes.
func routeOf(tasks []engine.NewTask, from, shards, limit int) (r route, err error) {
	r.at = make([]int, len(tasks))
	stored := make([]bool, len(tasks))
	store := func(i, shard int) bool {
		home, bound := tasks[i].Home(shards)
		if bound && home != shard || slices.ContainsFunc(siblingsOf(tasks, i), func(n int) bool { return !stored[n] }) {
			return false
		}
		r.at[i], stored[i] = shard, true
		return true
	}
	var others []int
	for i := range tasks {
		switch t := tasks[i].Tied; {
		case t != nil && t.Twin >= 0: // is not stored
		case store(i, from):
		case t.Parent || len(siblingsOf(tasks, i)) > 0:
			others = append(others, i)
		default:
			r.at[i], _ = tasks[i].Home(shards)
		}
	}
	bytes := 0
	for shard := from; len(others) > 0; {
		next, _ := tasks[others[0]].Home(shards)
		r.hops = append(r.hops, BatchHop{shard, next})
		shard = next
		for _, i := range others {
			bytes += len(tasks[i].Rec) + len(tasks[i].Key.Queue) + len(tasks[i].Key.Tenant) + taskCost
		}
		if bytes > limit {
			return r, &base.Invalid{
				Field: "follow-ups that wait for each other over shards",
				Value: fmt.Sprint("they are written ", len(r.hops), " times, in ", bytes, " bytes and more"),
				Limit: fmt.Sprint("at most ", limit, " bytes; give them one LimitKey or Group, or let the earlier ones produce the later ones"),
			}
		}
		others = slices.DeleteFunc(others, func(i int) bool { return store(i, shard) })
	}
	return r, nil
}

// CheckRoute refuses a batch that is given to one shard if the tasks of it that wait for each other
// would be sent on so often that more is written than may be in one commit. The error is an
// *base.Invalid.
func CheckRoute(tasks []engine.NewTask, from, shards int, l BatchLimits) error {
	if shards == 1 || !slices.ContainsFunc(tasks, refersToSiblings) {
		return nil
	}
	_, err := routeOf(tasks, from, shards, l.Bytes)
	return err
}

// BatchHop is messages of one shard to another one, or to itself.
type BatchHop struct{ From, To int }

// BatchHops returns which messages bring the tasks that are given to a shard to the shards that
// store them, if they wait for each other, and then tell the shards of their parents, in such an
// order that each hop has begun when those before it have ended. others includes messages of the
// shard to itself that are sent in rare cases only.
func BatchHops(tasks []engine.NewTask, from, shards int, others bool) []BatchHop {
	waits := false
	for i := range tasks {
		waits = waits || tasks[i].Tied != nil && len(tasks[i].Tied.Parents) > 0
	}
	if !waits {
		return nil
	}
	r, _ := routeOf(tasks, from, shards, math.MaxInt) // no error: there is no limit
	hops := r.hops
	var asks, later []BatchHop
	add := func(to *[]BatchHop, h BatchHop) {
		if !slices.Contains(*to, h) {
			*to = append(*to, h)
		}
	}
	own := make(map[int]bool) // shards that certainly look up a parent, and send a message for others, perhaps
	for i := range tasks {
		t := &tasks[i]
		if t.Tied == nil || len(t.Tied.Parents) == 0 || t.Tied.Twin >= 0 {
			continue
		}
		siblings := siblingsOf(tasks, i)
		at, to := r.at[i], &asks
		if at != from {
			to = &later
			if len(siblings) == 0 && !t.Tied.Parent { // it is sent by itself
				add(&asks, BatchHop{from, at})
			}
		}
		for _, p := range t.Tied.Parents {
			of := keys.ShardOf(p, shards)
			_, sibling := keys.NthOf(p)
			if sibling {
				of, siblings = r.at[siblings[0]], siblings[1:]
			}
			if of == at && !(others && at == from) {
				if sibling && at == from { // it needs no looking up
					continue
				}
				if !own[at] {
					own[at] = true
					continue
				}
			}
			add(to, BatchHop{at, of})
		}
	}
	return append(append(hops, asks...), later...)
}

// Refuses reports whether a task is not to be stored if a parent is missing.
func Refuses(tasks []engine.NewTask) bool {
	for i := range tasks {
		if tasks[i].Tied != nil && tasks[i].Tied.Refuses {
			return true
		}
	}
	return false
}

// askCap is how many parents a shard is asked for at once.
const askCap = 4096

// FindMissing returns the first task that is refused because a parent is missing, and that parent;
// task is negative if there is none. missing asks a shard which tasks do not exist. find asks a
// shard for the holder of an idempotency key, and returns an error that matches ErrNotFound if
// there is none: a task with a taken key is not refused.
func FindMissing(
	tasks []engine.NewTask, shards int, missing func(shard int, ids []keys.ID) ([]keys.ID, error),
	find func(shard int, key [keys.UniqueLen]byte) error,
) (task int, parent keys.ID, err error) {
	parents := make([][]keys.ID, shards)
	for i := range tasks {
		if tasks[i].Tied == nil || !tasks[i].Tied.Refuses {
			continue
		}
		for _, p := range tasks[i].Tied.Parents {
			if _, sibling := keys.NthOf(p); !sibling {
				at := keys.ShardOf(p, shards)
				parents[at] = append(parents[at], p)
			}
		}
	}
	gone := make(map[keys.ID]bool)
	for shard, of := range parents {
		for ids := range slices.Chunk(of, askCap) {
			lost, err := missing(shard, ids)
			if err != nil {
				return -1, parent, err
			}
			for _, id := range lost {
				gone[id] = true
			}
		}
	}
	for i := range tasks {
		t := tasks[i].Tied
		if len(gone) == 0 || t == nil || !t.Refuses {
			continue
		}
		n := slices.IndexFunc(t.Parents, func(p keys.ID) bool { return gone[p] })
		if n < 0 {
			continue
		}
		if home, _ := tasks[i].Home(shards); t.Unique != [keys.UniqueLen]byte{} {
			if err := find(home, t.Unique); err == nil {
				continue
			} else if !errors.Is(err, base.ErrNotFound) {
				return -1, parent, err
			}
		}
		return i, t.Parents[n], nil
	}
	return -1, parent, nil
}

// decoded returns the record of a task that was just encoded.
func decoded(t *engine.NewTask) record.Record {
	rec, err := record.Decode(t.Rec)
	if err != nil {
		panic("codeq: a record that was just encoded: " + err.Error())
	}
	return rec
}

// markParents sets Parent in the records of tasks that others of the batch wait for, directly or
// through a twin that is not stored. REQUIRES: the twins are found.
func markParents(tasks []engine.NewTask) {
	for i := range tasks {
		if tasks[i].Tied == nil {
			continue
		}
		for _, p := range tasks[i].Tied.Parents {
			n, ok := keys.NthOf(p)
			if !ok {
				continue
			}
			parent := &tasks[n]
			if parent.Tied != nil && parent.Tied.Twin >= 0 {
				parent = &tasks[parent.Tied.Twin]
			}
			if parent.Tied == nil {
				parent.Tied = &engine.Tied{Twin: -1}
			}
			if !parent.Tied.Parent {
				parent.Tied.Parent = true
				rec := decoded(parent)
				rec.Parent = true
				parent.Rec = rec.Encode()
			}
		}
	}
}

// findTwins finds the tasks of a batch that have the same idempotency key as an earlier one: the
// first one is stored, with the content of the last one that replaces it.
func findTwins(tasks []engine.NewTask) {
	first := make(map[[keys.UniqueLen]byte]int)
	for i := range tasks {
		t := tasks[i].Tied
		if t == nil || t.Unique == [keys.UniqueLen]byte{} {
			continue
		}
		n, ok := first[t.Unique]
		if !ok {
			first[t.Unique] = i
			continue
		}
		if t.Flags&record.ReplaceWaiting != 0 {
			replace(&tasks[n], &tasks[i])
		}
		tasks[i].Tied.Twin = n
	}
}

// replace gives a task the form that it would have if a later one of its batch replaced it, and
// leaves of the later one a task with the same key.
func replace(t, by *engine.NewTask) {
	was, rec := decoded(t), decoded(by)
	rest := record.Record{Head: record.Head{Ties: rec.Ties}, UniqueKey: rec.UniqueKey, GroupKey: rec.GroupKey, LimitKey: rec.LimitKey}
	rest.Flags &^= record.ReplaceWaiting // it is done
	rec.Parents, rec.OnDead, rec.OnMissing, rec.Parent = was.Parents, was.OnDead, was.OnMissing, was.Parent || rec.Parent
	t.Key = by.Key
	t.Encode(&rec, nil)
	by.Encode(&rest, nil)
}

// HasReplaced reports whether a task with Replace, which was not stored as others of its batch have
// the same key, has replaced them: the first one was stored, or has replaced another one.
// duplicates, in ascending order, are the tasks that were not stored.
func HasReplaced(tasks []engine.NewTask, i int, duplicates []int) bool {
	if tasks[i].Tied == nil || tasks[i].Tied.Twin < 0 {
		return false
	}
	_, refused := slices.BinarySearch(duplicates, tasks[i].Tied.Twin)
	return !refused
}

// BatchBuilder collects the tasks of a batch.
type BatchBuilder struct {
	Tasks []engine.NewTask
	cost  BatchCost
	tied  bool // some are bound to others
}

// Add adds a task. The error, a *base.Invalid, says which limit is exceeded.
func (b *BatchBuilder) Add(t engine.NewTask, l BatchLimits) error {
	b.Tasks, b.tied = append(b.Tasks, t), b.tied || t.Tied != nil
	return b.cost.Add(&b.Tasks[len(b.Tasks)-1], l)
}

// Finish finds twins and parents, after all tasks have been added.
func (b *BatchBuilder) Finish() {
	if b.tied {
		findTwins(b.Tasks)
		markParents(b.Tasks)
	}
}

// BatchLimits bound the writes of a batch.
type BatchLimits struct {
	Parents int // of all tasks
	Bytes   int
}

// MaxBatchLimits are the largest limits of any node. A group has no more than two operations beyond
// its budgets, of so many bytes each, and Pebble refuses a batch of 4 GiB.
var MaxBatchLimits = BatchLimits{Parents: 1 << 20, Bytes: 1 << 30}

// BatchCost is about how much new tasks write in their commit.
type BatchCost struct{ Parents, Bytes int }

// The bytes that a new task writes at the most in addition to its record: its keys, and entries in
// the catalogue and counters; and those for each parent, a key or a message.
const (
	taskCost   = 300
	parentCost = 64
)

// Add adds a task. The error, a *base.Invalid, says which limit is exceeded.
func (c *BatchCost) Add(t *engine.NewTask, l BatchLimits) error {
	c.Bytes += len(t.Rec) + len(t.Key.Queue) + len(t.Key.Tenant) + taskCost
	if t.Tied != nil {
		c.Parents += len(t.Tied.Parents)
		c.Bytes += len(t.Tied.Parents) * parentCost
	}
	if c.Parents <= l.Parents && c.Bytes <= l.Bytes {
		return nil
	}
	return c.refuse(l)
}

// refuse returns the error of the limit that is exceeded.
func (c *BatchCost) refuse(l BatchLimits) error {
	if c.Parents > l.Parents {
		return &base.Invalid{
			Field: "parents of the batch",
			Value: fmt.Sprint(c.Parents, " and more"), Limit: fmt.Sprint("at most ", l.Parents),
		}
	}
	return &base.Invalid{
		Field: "bytes to be written at once",
		Value: fmt.Sprint(c.Bytes, " bytes and more"), Limit: fmt.Sprint("at most ", l.Bytes, " bytes"),
	}
}
