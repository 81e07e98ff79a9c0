package codeq

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/cluster"
	"codeq/internal/localsocket"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// WorkerInfo describes a call of [Queue.Run] that has not returned, for dashboards.
type WorkerInfo struct {
	Name              string   `json:",omitzero"` // [RunOptions.Name]
	Node              string   `json:",omitzero"` // in a cluster, the node on which it runs
	Queues            []string `json:",omitzero"` // that it claims from
	Concurrency, Busy int      `json:",omitzero"` // handlers at the same time: at the most, and now

	Hung []HungHandler `json:",omitempty"` // that go on after the end of their contexts, whatever ended these

	Since     time.Time `json:",omitzero"` // when the call has begun
	Quiet     bool      `json:",omitzero"` // it takes no tasks, see [Queue.QuietWorkers]
	LastError string    `json:",omitzero"` // why the node could not be asked; all fields but Node are zero then
}

// HungHandler is a handler that goes on after the end of its context, and takes a place of its
// [Queue.Run]. One of a batch is listed for each of its tasks.
type HungHandler struct {
	ID       ID        `json:",omitzero"` // of the task
	Queue    string    `json:",omitzero"`
	Attempt  int       `json:",omitzero"`
	Since    time.Time `json:",omitzero"` // when its context has ended
	Replaced bool      `json:",omitzero"` // another handler has its place ([RunOptions.ReplaceStuck])
}

// Workers lists the calls of [Queue.Run] that have not returned, on all nodes, ordered by node and
// name. A node that does not answer within [Cluster.CallTimeout], or until ctx ends, or has too old
// a version, has one entry, with LastError. It takes some microseconds and a message to each node.
//
// Errors: [ErrInvalid], [ErrClosed], and that of ctx if it has ended before.
func (q *Queue) Workers(ctx context.Context) (_ []WorkerInfo, err error) {
	defer public(&err)
	var all []WorkerInfo
	if done, err := q.tell(ctx, localsocket.Workers, nil, &all); done {
		return all, err
	}
	all = q.ownWorkers()
	for _, a := range q.askNodes(ctx, &workersCall{Do: listWorkers}) {
		var infos []WorkerInfo
		if err := a.Read(&infos); err != nil {
			infos = []WorkerInfo{{Node: a.Node, LastError: base.Prefixed(err).Error()}}
		}
		all = append(all, infos...)
	}
	slices.SortStableFunc(all, func(a, b WorkerInfo) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Name, b.Name), a.Since.Compare(b.Since))
	})
	return all, nil
}

// QuietWorkers stops workers from taking new tasks, as before a deployment, or when one does harm:
// the calls of [Queue.Run] with this [RunOptions].Name, or all if name is "", on all nodes. When it
// returns, their claims have ended; handlers go on until [WorkerInfo].Busy is 0. It lasts until
// [Queue.ResumeWorkers], or until Run returns, and is not stored. [Queue.Pause] stops a queue.
//
// [ErrNotFound] says that no worker has the name, [ErrUncertain] that a node did not answer within
// [Cluster.CallTimeout], or until ctx ended: its workers may be quiet, and those of the others are.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrUncertain], [ErrClosed], and that of ctx.
func (q *Queue) QuietWorkers(ctx context.Context, name string) (err error) {
	defer public(&err)
	if done, err := q.tell(ctx, localsocket.QuietWorkers, name, nil); done {
		return err
	}
	return q.tellWorkers(ctx, &workersCall{Do: quietWorkers, Name: name})
}

// ResumeWorkers ends [Queue.QuietWorkers] for workers of a [RunOptions].Name; "": for all.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrUncertain], [ErrClosed], and that of ctx.
func (q *Queue) ResumeWorkers(ctx context.Context, name string) (err error) {
	defer public(&err)
	if done, err := q.tell(ctx, localsocket.ResumeWorkers, name, nil); done {
		return err
	}
	return q.tellWorkers(ctx, &workersCall{Do: resumeWorkers, Name: name})
}

// workersCall is a node's call to the others about their workers. It is sent as JSON, and so are
// the answers: a list of WorkerInfo, or the number of workers concerned.
type workersCall struct {
	Do   string
	Name string
}

const listWorkers, quietWorkers, resumeWorkers = "list", "quiet", "resume"

func (q *Queue) askNodes(ctx context.Context, c *workersCall) []cluster.Answer {
	if q.node == nil {
		return nil
	}
	return q.node.AskNodes(ctx, wire.AppendJSON(nil, c))
}

func (q *Queue) serveNode(ctx context.Context, body []byte) ([]byte, error) {
	if answer := q.slow.Answer(body); answer != nil {
		return answer, nil
	}
	c := new(workersCall)
	if err := json.Unmarshal(body, c); err != nil {
		return nil, errMalformedCall
	}
	if c.Do == listWorkers {
		return wire.AppendJSON(nil, q.ownWorkers()), nil
	}
	n, err := q.tellOwnWorkers(ctx, c)
	return wire.AppendJSON(nil, n), err
}

// tellWorkers tells the workers of all nodes.
func (q *Queue) tellWorkers(ctx context.Context, c *workersCall) error {
	if err := checkName("worker name", c.Name, record.MaxWorker); err != nil {
		return err
	}
	var told int
	var own error
	var here sync.WaitGroup
	here.Go(func() {
		own = guarded(q.opts.log, "quiet of workers", func() (err error) { told, err = q.tellOwnWorkers(ctx, c); return err })
	})
	answers := q.askNodes(ctx, c)
	here.Wait()
	errs := []error{own}
	for _, a := range answers {
		var n int
		errs = append(errs, a.Read(&n))
		told += n
	}
	switch err := errors.Join(errs...); {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrUncertain, err)
	case told == 0 && c.Name != "":
		return fmt.Errorf("%w: worker %q", ErrNotFound, c.Name)
	}
	return nil
}

func (q *Queue) ownWorkers() []WorkerInfo {
	infos := []WorkerInfo{}
	for r := range q.runs.All {
		w := WorkerInfo{Name: r.opts.Name, Queues: slices.Clone(r.opts.Queues), Concurrency: r.opts.Concurrency, Since: r.since.UTC()}
		if q.node != nil {
			w.Node = q.node.Self().Node
		}
		w.Busy, w.Quiet = r.pool.State()
		for t, h := range r.pool.Hung {
			for _, f := range tasksOf(t) {
				w.Hung = append(w.Hung, HungHandler{f.lease.ID, f.lease.Queue, f.lease.Attempt, h.Since.UTC(), h.Replaced})
			}
		}
		infos = append(infos, w)
	}
	return infos
}

// tellOwnWorkers tells those of this process, and returns how many it has told.
func (q *Queue) tellOwnWorkers(ctx context.Context, c *workersCall) (told int, err error) {
	var ending []<-chan struct{} // claims
	for r := range q.runs.All {
		if c.Name != "" && c.Name != r.opts.Name {
			continue
		}
		told++
		switch c.Do {
		case quietWorkers:
			ending = append(ending, r.pool.Quiet())
		case resumeWorkers:
			r.pool.Resume()
		default:
			return 0, errMalformedCall
		}
	}
	for _, ended := range ending {
		select {
		case <-ended:
		case <-ctx.Done():
			return told, base.EndOf(ctx)
		}
	}
	return told, nil
}
