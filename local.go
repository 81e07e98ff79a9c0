package codeq

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/cluster"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/localsocket"
	"codeq/internal/manifest"
	"codeq/internal/peer"
	"codeq/internal/platform"
)

// A program beside the process that has a queue open calls it by its local socket: operations as of
// nodes of a cluster, and verbs about the process (processVerbs), resolved as those of its callers.

// ServeLocal serves calls of other programs on this machine, by [OpenLocal], until ctx ends or the
// queue is closed. It makes a unix socket in the queue's directory "local", or elsewhere if the
// path is too long, in place of one that a killed process has left. Only the user of this process
// and root may use it; they can do the same by the files. A slow or dying program disturbs its own
// calls only. It serves 100 connections, calls of a program, and subscriptions.
//
// It returns nil if ctx ended, and [ErrClosed] if the queue was closed, when the calls of others
// have ended and the socket is removed. [ErrInvalid] refuses a second call beside it;
// [io/fs.ErrPermission] a socket's directory that is a link, another user's, or open to others.
//
// Errors: [ErrInvalid], [io/fs.ErrPermission], [ErrClosed], those of the file system, and
// [errors.ErrUnsupported] (the queue was opened by [OpenLocal]).
func (q *Queue) ServeLocal(ctx context.Context) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	if err := q.onlyHere("ServeLocal"); err != nil {
		return err
	}
	if err := q.enter(); err != nil {
		return err
	}
	defer q.calls.Done()
	select {
	case q.serving <- struct{}{}:
		defer func() { <-q.serving }()
	default:
		return &InvalidError{"ServeLocal", "a call beside another one", "one at a time"}
	}
	if vfs.Root(q.opts.private.FS) != vfs.Default {
		return fmt.Errorf("%w: a socket in a file system that is not the system's", errors.ErrUnsupported)
	}
	if ctx.Err() != nil {
		return nil
	}
	return q.serveLocal(ctx)
}

func (q *Queue) serveLocal(ctx context.Context) error {
	id, err := peer.ParseID(q.dir.ID)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrCorrupt, manifest.Name, err)
	}
	limits := &q.opts.Limits
	server, err := localsocket.Listen(localsocket.Config{
		Queue: q.dir.Path, Check: q.dir.Check, ID: id, Format: manifest.Format, Body: min(peer.MaxBody, limits.CommitBytes+limits.Payload+1<<20),
		Serve: q.serveProgram, Verbs: q.processVerbs(), Subscribe: q.subscribeProgram, Waits: waitsLong,
		EncodeError: encodeOwnError, PanicError: panicError, Logger: q.opts.log,
	})
	if err != nil {
		return fmt.Errorf("serve %s locally: %w", q.dir.Path, err)
	}
	q.opts.log.Info("serving programs on this machine", "socket", server.Socket())
	select {
	case <-ctx.Done():
	case <-q.closing:
		err = ErrClosed
	}
	return errors.Join(err, server.Close())
}

// OpenLocal opens a queue that another process serves by [Queue.ServeLocal], to look at it and
// steer it by the same verbs, which are carried out there. It neither locks the directory nor
// writes to it; [Queue.Close] closes the connection only. The program must be of a build with the
// same format, run by the user of that process, or root. Paths are on this machine.
//
// Any call may also return [ErrNotServed]: it was not applied. If the process ends, or ctx does,
// during a change, the error matches [ErrUncertain]. When another process serves the queue, calls
// work again; a [Subscription] has ended with ErrNotServed. [Queue.Run], [Queue.Claim],
// [Queue.ClaimBatch] and [Queue.ServeLocal] return [errors.ErrUnsupported].
//
// Errors: [ErrInvalid], [ErrNotQueue], [ErrNotServed], [ErrFormat], [io/fs.ErrPermission],
// [ErrCorrupt], those of the file system, and that of ctx.
func OpenLocal(ctx context.Context, dir string) (_ *Queue, err error) {
	defer public(&err)
	if ctx == nil {
		return nil, errNoContext
	}
	if err := checkDir("OpenLocal dir", dir); err != nil {
		return nil, err
	}
	d, err := manifest.Look(platform.FS, dir)
	if err != nil {
		return nil, err
	}
	o, err := (*Options)(nil).withDefaults()
	if err != nil {
		return nil, err
	}
	o.setShards(d.Shards)
	c, err := localsocket.NewClient(d, manifest.Format, waitsLong, decodeError, o.log)
	if err != nil {
		return nil, err
	}
	q := &Queue{
		opts: o, dir: d, replicas: make([]*replica, d.Shards), backend: &remote{c, d.Shards},
		closing: make(chan struct{}), ended: make(chan struct{}), configuring: make(chan struct{}, 1),
	}
	if err := c.Tell(ctx, localsocket.Limits, nil, &o.Limits); err != nil {
		return nil, errors.Join(fmt.Errorf("codeq: open %s by its socket: %w", dir, err), c.Close())
	}
	return q, nil
}

// onlyHere refuses a verb of a queue that another process has open, or that a tool has.
func (q *Queue) onlyHere(verb string) error {
	if _, ok := q.backend.(*remote); ok {
		return fmt.Errorf("%w: %s, of a queue that another process has open", errors.ErrUnsupported, verb)
	}
	if q.opts.Tool {
		return fmt.Errorf("%w: %s, of a queue that is open for a tool (Options.Tool)", errors.ErrUnsupported, verb)
	}
	return nil
}

// remote is another process that has the queue open, and is called by its socket.
type remote struct {
	*localsocket.Client
	shards int
}

func (r *remote) begin(ctx context.Context) context.Context { return ctx }

func (r *remote) do(ctx context.Context, shard int, op request) (settled bool, err error) {
	body := op.Append(binary.BigEndian.AppendUint16(make([]byte, 0, 256), uint16(shard)))
	reply, err := r.Call(ctx, byte(op.base().kind), body, op.verb().is(readsOnly))
	if err != nil {
		return true, err
	}
	if err := parse(reply, op.ReadReply); err != nil {
		return true, fmt.Errorf("%w: reply for shard %d: %w", ErrUncertain, shard, err)
	}
	return true, nil
}

func (r *remote) produce(ctx context.Context, shard int, op *produceOp) (settled bool, err error) {
	return r.do(ctx, shard, op)
}

func (r *remote) await(ctx context.Context, id ID) (*engine.Outcome, error) {
	return awaitBy(ctx, r, id, r.shards)
}

func (r *remote) tell(ctx context.Context, verb byte, argument, reply any) (told bool, err error) {
	return true, r.Tell(ctx, verb, argument, reply)
}

// subscribe is Queue.Subscribe after its checks.
func (r *remote) subscribe(opts SubscribeOptions, kinds engine.KindSet) (*Subscription, error) {
	var hub entries.Hub
	events, err := hub.Subscribe(kinds, opts.Queues, opts.Buffer)
	if err != nil {
		return nil, err
	}
	from, err := r.Subscribe(opts, &hub, events)
	if err != nil {
		return nil, err
	}
	return &Subscription{events, from}, nil
}

// serveProgram resolves an operation of a program, on whichever node leads its shard.
func (q *Queue) serveProgram(ctx context.Context, kind byte, body []byte) ([]byte, error) {
	if len(body) < cluster.CallHeader {
		return nil, errMalformedCall
	}
	shard := int(binary.BigEndian.Uint16(body))
	if shard >= len(q.replicas) {
		return nil, errMalformedCall
	}
	op, err := q.requestOf(kind, "", body[cluster.CallHeader:])
	if err != nil || !op.verb().is(ofPrograms) {
		return nil, errMalformedCall
	}
	op.base().done = make(chan error, 1)
	settled := true
	switch op := op.(type) {
	case *produceOp:
		op.Call.Seq = 0 // it is numbered as one of this node
		settled, err = q.backend.produce(ctx, shard, op)
	case *callOp:
		err = op.carryOut(ctx, q.backend, shard)
	case *awaitOp:
		var o *engine.Outcome
		if o, err = q.backend.await(ctx, op.ID); err == nil {
			op.Outcome = *o
		}
	case *takenOp:
		err = q.doTaken(ctx, shard, op)
	case *ruling:
		if err = q.mayConfigure(op); err == nil {
			settled, err = q.do(ctx, shard, op)
		}
	default:
		settled, err = q.do(ctx, shard, op)
	}
	if waits, ok := op.(abandoned); ok && !settled {
		waits.abandon(nil)
	}
	if err != nil {
		return nil, err
	}
	return op.AppendReply(nil), nil
}

// waitsLong reports whether operations of a kind may take long, and have small answers.
func waitsLong(kind byte) bool {
	k := callKind(kind)
	return k == callAwait || k == callIdle || k == callTaken || k == callCall
}

// subscribeProgram begins a subscription of a program, which takes its events out all the time.
func (q *Queue) subscribeProgram(ctx context.Context, options []byte) (*entries.Subscription, error) {
	var opts SubscribeOptions
	if json.Unmarshal(options, &opts) != nil {
		return nil, errMalformedCall
	}
	opts.Buffer = 0
	sub, err := q.subscribe(ctx, opts)
	if err != nil {
		return nil, err
	}
	return sub.events, nil
}

// The arguments of verbs that have more than one.
type (
	replacement struct {
		Old string
		New Peer
	}
	transfer struct {
		Shard int
		Node  string
	}
)

// processVerbs are the verbs that are about a process.
func (q *Queue) processVerbs() localsocket.Verbs {
	type none = struct{}
	type ctx = context.Context
	return localsocket.Verbs{
		localsocket.Limits:        localsocket.Answering(func(ctx, none) (Limits, error) { return q.opts.Limits, nil }),
		localsocket.Storage:       localsocket.Answering(func(ctx, none) (*StorageStats, error) { return q.StorageStats() }),
		localsocket.Status:        localsocket.Answering(func(c ctx, _ none) (*ClusterStatus, error) { return q.ClusterStatus(c) }),
		localsocket.Workers:       localsocket.Answering(func(c ctx, _ none) ([]WorkerInfo, error) { return q.Workers(c) }),
		localsocket.Process:       localsocket.Answering(func(c ctx, _ none) (*ProcessInfo, error) { return q.ProcessInfo(c) }),
		localsocket.Health:        localsocket.Obeying(func(c ctx, _ none) error { return q.Health(c) }),
		localsocket.Ready:         localsocket.Obeying(func(c ctx, _ none) error { return q.WaitReady(c) }),
		localsocket.Checkpoint:    localsocket.Obeying(func(c ctx, dir string) error { return q.Checkpoint(c, dir) }),
		localsocket.FullCopy:      localsocket.Obeying(func(c ctx, dir string) error { return q.Checkpoint(c, dir, CheckpointOptions{Copy: true}) }),
		localsocket.AddNode:       localsocket.Obeying(q.AddNode),
		localsocket.RemoveNode:    localsocket.Obeying(q.RemoveNode),
		localsocket.ReplaceNode:   localsocket.Obeying(func(c ctx, r replacement) error { return q.ReplaceNode(c, r.Old, r.New) }),
		localsocket.Transfer:      localsocket.Obeying(func(c ctx, t transfer) error { return q.TransferLeadership(c, t.Shard, t.Node) }),
		localsocket.Drain:         localsocket.Obeying(func(c ctx, _ none) error { return q.Drain(c) }),
		localsocket.Undrain:       localsocket.Obeying(func(c ctx, _ none) error { return q.Undrain(c) }),
		localsocket.QuietWorkers:  localsocket.Obeying(q.QuietWorkers),
		localsocket.ResumeWorkers: localsocket.Obeying(q.ResumeWorkers),
	}
}
