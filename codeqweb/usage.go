package codeqweb

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"codeq"
)

// The bounds of a reading that estimates what takes the disk.
const (
	usageTime    = 2 * time.Second
	usageTasks   = 20_000
	usageFirst   = 100 // tasks from each end of a queue and state, before any is read further
	usageLargest = 20
	usageRows    = 100 // of the page
)

// recordBytes is about the size of the record of a task without a payload, with its key.
const recordBytes = 30

// usage estimates the sizes of tasks, by queue and state, from the first and the last ones of each.
type usage struct {
	At      time.Time
	Took    time.Duration
	Tasks   uint64     // all
	Read    int        // of these
	Bytes   int64      // of all, about
	Groups  []usageOf  // the largest ones first
	Largest []largeOne // among those read, by payload and result
}

// usageOf is that of a queue and state.
type usageOf struct {
	Queue string
	State codeq.State
	Tasks uint64
	Read  int
	Bytes int64 // about; before compression, and without steps, cursors and logs
	// First and Last are when the first and the last of these ended tasks are deleted; zero: never.
	// They are known if Ends.
	First, Last time.Time `json:",omitzero"`
	Ends        bool      `json:",omitzero"` // the first and the last one were read

	// from the first task on, and from the last one back
	sums    [2]int64 // bytes
	reads   [2]int64 // tasks
	cursors [2]string
	seen    map[codeq.ID]struct{}
	begun   bool
	done    bool // all were read
}

// largeOne is a task with a large payload or result.
type largeOne struct {
	ID              codeq.ID
	Queue           string
	State           codeq.State
	Payload, Result int64 // bytes
}

// bytesOf returns about the size of a task, before compression.
func bytesOf(t *codeq.TaskInfo) int64 {
	n := recordBytes + len(t.Payload) + len(t.Result) + len(t.LastError) + len(t.Tenant) + len(t.Kind) + len(t.Group) + len(t.LimitKey) + len(t.Unique.Key) +
		len(codeq.ID{})*len(t.After) + len(t.Progress.Note)
	for _, texts := range []map[string]string{t.Headers, t.Metadata} {
		for name, value := range texts {
			n += len(name) + len(value)
		}
	}
	for i := range t.History {
		n += len(t.History[i].Error) + len(t.History[i].Worker)
	}
	return int64(n)
}

// usageReader reads the tasks of a usage.
type usageReader struct {
	d      *Dashboard
	ctx    context.Context
	ends   time.Time
	into   *usage
	groups map[usageKey]*usageOf
}

type usageKey struct {
	queue string
	state codeq.State
}

// readUsage reads for usageTime and up to usageTasks: of each queue and state first some of the
// first and of the last tasks, then more, in turn.
func (d *Dashboard) readUsage(ctx context.Context) (*usage, error) {
	begin := time.Now()
	u := &usage{At: begin.UTC(), Groups: []usageOf{}, Largest: []largeOne{}}
	stats, err := d.q.Stats(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithDeadline(ctx, begin.Add(2*usageTime)) // a page may take long
	defer cancel()
	r := &usageReader{d, ctx, begin.Add(usageTime), u, make(map[usageKey]*usageOf)}
	var read []*usageOf
	for queue, counts := range stats {
		for i, n := range [...]uint64{counts.Ready, counts.Scheduled, counts.Blocked, counts.Leased, counts.Dead, counts.Done, counts.Canceled} {
			if n == 0 {
				continue
			}
			g := &usageOf{Queue: queue, State: states[i], Tasks: n, seen: make(map[codeq.ID]struct{})}
			r.groups[usageKey{queue, g.State}] = g
			if u.Tasks += n; g.State != codeq.Scheduled {
				read = append(read, g)
			}
		}
	}
	slices.SortFunc(read, func(a, b *usageOf) int {
		return cmp.Or(cmp.Compare(b.Tasks, a.Tasks), cmp.Compare(a.Queue, b.Queue), cmp.Compare(a.State, b.State))
	})
	if counts := len(r.groups); counts > len(read) { // scheduled tasks have the order of their time only: all queues are read at once
		read = append([]*usageOf{{State: codeq.Scheduled, seen: make(map[codeq.ID]struct{})}}, read...)
	}
	part := max(1, min(usageFirst, usageTasks/max(1, len(read))/2))
	for again := true; again && err == nil; part = codeq.MaxPage {
		again = false
		for _, g := range read {
			if err = r.readMore(g, part); err != nil {
				break
			}
			again = again || !g.done && !r.isDone()
		}
	}
	if err != nil && !(errors.Is(err, context.DeadlineExceeded) && time.Since(begin) >= usageTime) {
		return nil, err
	}
	for _, g := range r.groups {
		if g.Read > 0 {
			g.Bytes = g.estimate()
		}
		g.seen = nil
		u.Bytes += g.Bytes
		u.Groups = append(u.Groups, *g)
	}
	slices.SortFunc(u.Groups, func(a, b usageOf) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(b.Tasks, a.Tasks), cmp.Compare(a.Queue, b.Queue), cmp.Compare(a.State, b.State))
	})
	u.Took = time.Since(begin)
	return u, nil
}

func (r *usageReader) isDone() bool { return r.into.Read >= usageTasks || !time.Now().Before(r.ends) }

// readMore reads tasks of a group from both ends, until these meet.
func (r *usageReader) readMore(g *usageOf, limit int) error {
	begun := g.begun
	for end := range g.cursors {
		if g.done || r.isDone() {
			break
		}
		p, err := r.d.q.ListPage(r.ctx, codeq.PageOptions{
			TaskFilter: codeq.TaskFilter{States: []codeq.State{g.State}, Queue: g.Queue},
			Limit:      min(limit, usageTasks-r.into.Read), Newest: end == 1, Cursor: g.cursors[end],
		})
		if err != nil {
			return err
		}
		g.begun, g.cursors[end] = true, p.Next
		added := r.add(g, end, p.Tasks)
		g.done = g.done || p.Next == "" || added == 0 && begun
		if n := len(p.Tasks); n > 0 && !begun {
			switch {
			case end == 1:
				g.Last, g.Ends = p.Tasks[0].Until, true
			case g.done:
				g.First, g.Last, g.Ends = p.Tasks[0].Until, p.Tasks[n-1].Until, true
			default:
				g.First = p.Tasks[0].Until
			}
		}
	}
	return nil
}

// add adds tasks that were read from an end, and returns how many are new.
func (r *usageReader) add(of *usageOf, end int, tasks []*codeq.TaskInfo) (added int) {
	for _, t := range tasks {
		if _, ok := of.seen[t.ID]; ok {
			continue
		}
		of.seen[t.ID] = struct{}{}
		g := r.groups[usageKey{t.Queue, t.State}]
		if g == nil || uint64(g.Read) >= g.Tasks { // it is newer than the counts
			continue
		}
		added++
		g.Read++
		g.reads[end]++
		g.sums[end] += bytesOf(t)
		r.into.Read++
		r.into.addLarge(largeOne{t.ID, t.Queue, t.State, int64(len(t.Payload)), int64(len(t.Result))})
	}
	return added
}

// estimate returns the bytes of all tasks: both ends count the same, however far they were read.
func (g *usageOf) estimate() int64 {
	if g.Exact() {
		return g.sums[0] + g.sums[1]
	}
	average, ends := 0.0, 0.0
	for end, n := range g.reads {
		if n > 0 {
			average, ends = average+float64(g.sums[end])/float64(n), ends+1
		}
	}
	return int64(average / ends * float64(g.Tasks))
}

// addLarge keeps the largest tasks, the largest first.
func (u *usage) addLarge(l largeOne) {
	size := func(l largeOne) int64 { return l.Payload + l.Result }
	if size(l) == 0 || len(u.Largest) == usageLargest && size(l) <= size(u.Largest[usageLargest-1]) {
		return
	}
	at, _ := slices.BinarySearchFunc(u.Largest, l, func(a, b largeOne) int { return cmp.Compare(size(b), size(a)) })
	u.Largest = slices.Insert(u.Largest, at, l)
	u.Largest = u.Largest[:min(len(u.Largest), usageLargest)]
}

// Complete reports whether all tasks were read.
func (u *usage) Complete() bool { return uint64(u.Read) >= u.Tasks }

// Shown returns the groups that a page has.
func (u *usage) Shown() []usageOf { return u.Groups[:min(len(u.Groups), usageRows)] }

// Left returns how many groups it does not have.
func (u *usage) Left() int { return len(u.Groups) - len(u.Shown()) }

// Ended returns the groups of tasks that are kept after their end.
func (u *usage) Ended() (groups []usageOf) {
	for _, g := range u.Shown() {
		if g.State == codeq.Dead || g.State == codeq.Done || g.State == codeq.Canceled {
			groups = append(groups, g)
		}
	}
	return groups
}

// Average returns the bytes of one task.
func (g usageOf) Average() int64 { return g.Bytes / int64(max(1, g.Tasks)) }

// Exact reports whether all of its tasks were read.
func (g usageOf) Exact() bool { return uint64(g.Read) >= g.Tasks }
