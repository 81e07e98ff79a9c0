package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/urfave/cli/v3"

	"codeq"
	"codeq/internal/heldkeys"
	"codeq/internal/private"
)

func (a *app) exportCommand() *cli.Command {
	return &cli.Command{
		Name: "export", Category: categoryKeep, Usage: "write all that is in a closed directory as JSON lines",
		Description: "Writes settings, schedules, keys that outlive their tasks, and tasks in every state, for import,\n" +
			"which may make another number of shards of them. Nobody may have the directory open: of a\n" +
			"queue that is in use, export a checkpoint. README.md of the command says what import cannot\n" +
			"carry over.",
		Flags:  []cli.Flag{&cli.StringFlag{Name: "file", Usage: "write to this new `FILE`; default: the standard output"}},
		Action: a.export,
	}
}

func (a *app) export(ctx context.Context, c *cli.Command) (err error) {
	if err := noArguments(c); err != nil {
		return err
	}
	t, err := a.directory(c)
	if err != nil {
		return err
	}
	r, err := t.read()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if s := r.Staleness(); s.Node != "" {
		return coded(exitRefused, fmt.Errorf("it is the directory of node %q, which may lack what the others have: export a checkpoint of the cluster", s.Node))
	}
	out := a.out
	if name := c.String("file"); name != "" {
		f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return coded(exitOther, err)
		}
		defer func() { err = errors.Join(err, f.Sync(), f.Close()) }()
		out = f
	}
	e := &exporter{ctx: ctx, dir: t.dir, r: r, out: bufio.NewWriterSize(out, 1<<20)}
	e.json = json.NewEncoder(e.out)
	e.json.SetEscapeHTML(false)
	if err := e.all(a); err != nil {
		return err
	}
	a.note("codeq: exported %d tasks, %d schedules, the settings of %d queues, %d keys of tasks that are gone",
		e.end.Tasks, e.end.Schedules, e.end.Settings, e.end.Keys)
	return nil
}

// exporter writes the contents of a directory in the order of the stages.
type exporter struct {
	ctx  context.Context
	dir  string
	r    *codeq.Reader
	out  *bufio.Writer
	json *json.Encoder
	end  portableEnd

	holds                map[string]bool // the queues with HoldGroups
	dead, begun, blocked []link          // tasks that are not written where they are listed
	apart                map[codeq.ID]bool
	turns                map[turn]codeq.ID // of those groups, the dead letter that holds the turn
}

// link is a task, and those for which it waits.
type link struct {
	id    codeq.ID
	after []codeq.ID
}

// turn is a group of tasks that follow each other.
type turn struct{ queue, tenant, limitKey, group string }

func (e *exporter) write(p portable) error {
	p.forJSON()
	return e.json.Encode(&p)
}

func (e *exporter) all(a *app) error {
	infos, err := e.r.Info(e.ctx)
	if err != nil {
		return err
	}
	storage, err := e.r.StorageStats()
	if err != nil {
		return err
	}
	if err := e.write(portable{Header: &portableHeader{"export", portableVersion, len(storage.Shards), a.now().UTC()}}); err != nil {
		return err
	}
	e.holds = make(map[string]bool)
	for _, q := range infos {
		s := q.Settings
		e.holds[q.Queue] = s.HoldGroups
		e.end.Settings++
		if err := e.write(portable{Settings: &portableSettings{q.Queue, s}}); err != nil {
			return err
		}
	}
	schedules, err := e.r.Schedules(e.ctx)
	if err != nil {
		return err
	}
	for i := range schedules {
		e.end.Schedules++
		if err := e.write(portable{Schedule: &schedules[i]}); err != nil {
			return err
		}
	}
	if err := e.keys(a.now()); err != nil {
		return err
	}
	for _, step := range []func() error{e.survey, e.ended, e.deadLetters, e.unended} {
		if err := step(); err != nil {
			return err
		}
	}
	if err := e.write(portable{End: &e.end}); err != nil {
		return err
	}
	return e.out.Flush()
}

// keys writes the keys that outlive their tasks.
func (e *exporter) keys(now time.Time) error {
	held, err := heldkeys.Read(e.ctx, private.FS, e.dir)
	if err != nil {
		return err
	}
	for i := range held {
		until := time.UnixMilli(int64(held[i].Until))
		if !until.After(now) {
			continue
		}
		e.end.Keys++
		if err := e.write(portable{Key: &portableKey{held[i].Hash[:], until.UTC()}}); err != nil {
			return err
		}
	}
	return nil
}

// each calls f with all tasks of a state, without their payloads.
func (e *exporter) each(s codeq.State, f func(*codeq.TaskInfo)) error {
	opts := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{s}}, NoPayload: true, Limit: codeq.MaxPage}
	for {
		p, err := e.r.ListPage(e.ctx, opts)
		if err != nil {
			return err
		}
		for _, t := range p.Tasks {
			f(t)
		}
		if opts.Cursor = p.Next; p.Next == "" {
			return nil
		}
	}
}

// survey finds the tasks that cannot be written in the order in which they are listed.
func (e *exporter) survey() error {
	e.apart, e.turns = make(map[codeq.ID]bool), make(map[turn]codeq.ID)
	add := func(to *[]link, t *codeq.TaskInfo) {
		*to = append(*to, link{t.ID, t.After})
		e.apart[t.ID] = true
	}
	last := make(map[turn]*codeq.TaskInfo)
	err := e.each(codeq.Dead, func(t *codeq.TaskInfo) {
		if len(t.After) > 0 {
			add(&e.dead, t)
		}
		if key := turnOf(t); t.Group != "" && e.holds[t.Queue] && (last[key] == nil || !t.At.Before(last[key].At)) {
			last[key] = t
		}
	})
	if err != nil {
		return err
	}
	for _, s := range []codeq.State{codeq.Leased, codeq.Ready, codeq.Scheduled, codeq.Blocked} {
		err := e.each(s, func(t *codeq.TaskInfo) {
			switch {
			case isBegun(t):
				add(&e.begun, t)
			case s == codeq.Blocked && len(t.After) > 0:
				add(&e.blocked, t)
			}
			if t.Group != "" && (s == codeq.Leased || s == codeq.Ready || s == codeq.Scheduled && isBegun(t)) {
				delete(last, turnOf(t)) // that one has the turn
			}
		})
		if err != nil {
			return err
		}
	}
	for key, t := range last {
		e.turns[key] = t.ID
	}
	return nil
}

func turnOf(t *codeq.TaskInfo) turn { return turn{t.Queue, t.Tenant, t.LimitKey, t.Group} }

// task writes a task.
func (e *exporter) task(t *codeq.TaskInfo) error {
	p := &portableTask{TaskInfo: *t}
	if t.Unique.Key != "" {
		holder, err := e.r.FindByKey(e.ctx, codeq.UniqueKey{
			Queue: t.Queue, Tenant: t.Tenant, Group: t.Group, LimitKey: t.LimitKey, Key: t.Unique.Key,
		})
		if err != nil && !errors.Is(err, codeq.ErrNotFound) {
			return err
		}
		p.KeyFree = err != nil || holder.ID != t.ID
	}
	p.HoldsTurn = t.State == codeq.Dead && e.turns[turnOf(t)] == t.ID
	e.end.Tasks++
	return e.write(portable{Task: p})
}

// list writes the tasks of states as they are listed, but for those that want writes apart.
func (e *exporter) list(states []codeq.State, wants func(*codeq.TaskInfo) bool) error {
	for _, s := range states {
		for t, err := range e.r.List(e.ctx, codeq.ListOptions{State: s}) {
			if err != nil {
				return err
			}
			if wants(t) {
				if err := e.task(t); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (e *exporter) ended() error {
	return e.list([]codeq.State{codeq.Done, codeq.Canceled}, func(*codeq.TaskInfo) bool { return true })
}

func (e *exporter) deadLetters() error {
	holds := func(t *codeq.TaskInfo) bool { return e.turns[turnOf(t)] == t.ID }
	err := e.list([]codeq.State{codeq.Dead}, func(t *codeq.TaskInfo) bool { return !e.apart[t.ID] && !holds(t) })
	if err != nil {
		return err
	}
	var last []link
	for _, l := range parentsFirst(e.dead) {
		t, err := e.r.Get(e.ctx, l.id)
		if err != nil {
			return err
		}
		if holds(t) {
			last = append(last, l)
		} else if err := e.task(t); err != nil {
			return err
		}
	}
	err = e.list([]codeq.State{codeq.Dead}, func(t *codeq.TaskInfo) bool { return !e.apart[t.ID] && holds(t) })
	if err != nil {
		return err
	}
	return e.links(last)
}

func (e *exporter) unended() error {
	if err := e.links(e.begun); err != nil {
		return err
	}
	err := e.list([]codeq.State{codeq.Ready, codeq.Scheduled, codeq.Blocked}, func(t *codeq.TaskInfo) bool { return !e.apart[t.ID] })
	if err != nil {
		return err
	}
	return e.links(parentsFirst(e.blocked))
}

// links writes tasks in their order.
func (e *exporter) links(links []link) error {
	for _, l := range links {
		t, err := e.r.Get(e.ctx, l.id)
		if err != nil {
			return err
		}
		if err := e.task(t); err != nil {
			return err
		}
	}
	return nil
}

// parentsFirst orders tasks so that each comes behind those of them for which it waits.
func parentsFirst(links []link) []link {
	index := make(map[codeq.ID]int, len(links))
	for i, l := range links {
		index[l.id] = i
	}
	sorted := make([]link, 0, len(links))
	next := make([]int, len(links)) // the parent that is visited next; -1: the task is sorted
	var stack []int
	for i := range links {
		if next[i] < 0 {
			continue
		}
		for stack = append(stack, i); len(stack) > 0; {
			at := stack[len(stack)-1]
			switch {
			case next[at] < 0:
				stack = stack[:len(stack)-1]
			case next[at] == len(links[at].after):
				next[at] = -1
				sorted = append(sorted, links[at])
				stack = stack[:len(stack)-1]
			default:
				parent, here := index[links[at].after[next[at]]]
				next[at]++
				if here && next[parent] == 0 {
					stack = append(stack, parent)
				}
			}
		}
	}
	return sorted
}
