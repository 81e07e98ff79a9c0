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
	Name string `json:",omitzero"` // [RunOptions.Name]
	Node string `json:",omitzero"` // in a cluster, the node on which it runs
	// Queues are those that it claims from.
	Queues []string `json:",omitzero"`
	// Concurrency is how many handlers run at the same time at the most, Busy how many do now.
	Concurrency, Busy int `json:",omitzero"`

	// Hung are the handlers that go on after the end of their contexts, whatever ended these.
	Hung []HungHandler `json:",omitempty"`

	Since time.Time `json:",omitzero"` // when the call has begun
	Quiet bool      `json:",omitzero"` // it takes no tasks, see [Queue.QuietWorkers]
	// LastError is why the node could not be asked; all fields but Node are zero then.
	LastError string `json:",omitzero"`
}

// HungHandler is a handler that goes on after the end of its context, and takes a place of its
// [Queue.Run]. One of a batch is listed for each of its tasks.
type HungHandler struct {
	ID      ID     `json:",omitzero"` // of the task
	Queue   string `json:",omitzero"`
	Attempt int    `json:",omitzero"`
	// Since is when its context has ended.
	Since time.Time `json:",omitzero"`
}

// Workers lists the calls of [Queue.Run] that have not returned, ordered by node and name; in a
// cluster those of all nodes: a member that does not answer within [Cluster.CallTimeout], or until
// ctx ends, or runs a version of codeq that does not know the question, has one entry, with
// LastError. It asks for nothing that is stored, and disturbs no shard: it takes some microseconds,
// and a message to each node.
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
		if a.Err == nil {
			a.Err = json.Unmarshal(a.Body, &infos)
		}
		if a.Err != nil {
			infos = []WorkerInfo{{Node: a.Node, LastError: base.Prefixed(a.Err).Error()}}
		}
		all = append(all, infos...)
	}
	slices.SortStableFunc(all, func(a, b WorkerInfo) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Name, b.Name), a.Since.Compare(b.Since))
	})
	return all, nil
}

// QuietWorkers stops workers from taking new tasks, as before a deployment, or when one does harm:
// the calls of [Queue.Run] with this [RunOptions].Name, or all of them if name is "", on all nodes
// of a cluster. When it returns, their claims have ended. Handlers that run go on, and so do those
// of tasks that were claimed before; [WorkerInfo].Busy tells when none is left. Other workers take
// the tasks, if there are any. It lasts until [Queue.ResumeWorkers], or until Run returns: nothing
// is stored, and a Run that begins later takes tasks. To stop a queue for all workers, see
// [Queue.Pause].
//
// It returns [ErrNotFound] if no worker has the name, and [ErrUncertain] if a node did not answer
// within [Cluster.CallTimeout], or if ctx has ended: it is not known then whether its workers are
// quiet. Those of the other nodes are, and it may be called again.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrUncertain], [ErrClosed], and that of ctx.
func (q *Queue) QuietWorkers(ctx context.Context, name string) (err error) {
	defer public(&err)
	if done, err := q.tell(ctx, localsocket.QuietWorkers, name, nil); done {
		return err
	}
	return q.tellWorkers(ctx, &workersCall{Do: quietWorkers, Name: name})
}

// ResumeWorkers ends the effect of [Queue.QuietWorkers] on workers: those with this
// [RunOptions].Name, or all if name is "". Errors are those of QuietWorkers.
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

const (
	listWorkers   = "list"
	quietWorkers  = "quiet"
	resumeWorkers = "resume"
)

// askNodes asks all other nodes of a cluster.
func (q *Queue) askNodes(ctx context.Context, c *workersCall) []cluster.Answer {
	if q.node == nil {
		return nil
	}
	return q.node.AskNodes(ctx, wire.AppendJSON(nil, c))
}

// serveNode answers another node.
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
		if a.Err == nil {
			a.Err = json.Unmarshal(a.Body, &n)
		}
		if told += n; a.Err != nil {
			errs = append(errs, a.Err)
		}
	}
	switch err := errors.Join(errs...); {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrUncertain, err)
	case told == 0 && c.Name != "":
		return fmt.Errorf("%w: worker %q", ErrNotFound, c.Name)
	}
	return nil
}

// ownWorkers describes the workers of this process.
func (q *Queue) ownWorkers() []WorkerInfo {
	infos := []WorkerInfo{}
	for r := range q.runs.All {
		w := WorkerInfo{Name: r.opts.Name, Queues: slices.Clone(r.opts.Queues), Concurrency: r.opts.Concurrency, Since: r.since.UTC()}
		if q.node != nil {
			w.Node = q.node.Self().Node
		}
		w.Busy, w.Quiet = r.pool.State()
		for t, since := range r.pool.Hung {
			for _, f := range tasksOf(t) {
				w.Hung = append(w.Hung, HungHandler{f.lease.ID, f.lease.Queue, f.lease.Attempt, since.UTC()})
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
