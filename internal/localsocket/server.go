package localsocket

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/entries"
	"codeq/internal/guard"
	"codeq/internal/peer"
)

// The bounds of what programs may use up of the process that serves.
const (
	maxConnections   = 100
	maxSubscriptions = 100
	maxCalls         = 100 // of a program, beside those that wait for events
	maxWaits         = 80  // of those, for calls that may take long
	maxRunning       = 64  // calls of all connections that do not wait, until their answers are written
	maxLarge         = 4   // requests of more than 64 KiB
	maxQueued        = 1 << 20
	idle             = 2 * time.Minute
)

// Config of a Server.
type Config struct {
	Queue  string       // its directory
	Check  func() error // returns an error if Queue is not the path of the directory any more
	ID     peer.ID      // of the directory
	Format int          // of the build
	Body   int          // bytes of a request, at most
	// Serve answers a call that is about a shard. Its ctx ends when the caller has gone, and with
	// Close, by the cause base.ErrNotServed.
	Serve func(ctx context.Context, kind byte, body []byte) (reply []byte, err error)
	// Waits reports whether calls of such a kind may take long, and have small answers.
	Waits func(kind byte) bool
	Verbs Verbs
	// Subscribe begins a subscription with the options of a Client.
	Subscribe func(ctx context.Context, options []byte) (*entries.Subscription, error)
	// EncodeError returns the sent form of an error, and PanicError the error of a panic.
	EncodeError func(error) (code byte, text string)
	PanicError  func(what string, value any, stack []byte) error
	Logger      *slog.Logger
}

// Server answers the calls of programs until it is closed.
type Server struct {
	c       Config
	place   *place
	node    *peer.Node
	lines   *peer.Lines // about connections that are not accepted
	ctx     context.Context
	cancel  context.CancelCauseFunc
	calls   sync.WaitGroup // goroutines of calls; the readers of node add
	running chan struct{}  // an element for each call that does not wait
	subs    subscriptions

	background sync.WaitGroup // ends of subscriptions; calls add
}

// serverName and clientName are the names of the two sides.
const serverName, clientName = "process", "client"

// Listen begins to serve a queue. REQUIRES: its directory is locked, and nothing else serves it.
func Listen(c Config) (*Server, error) {
	s := &Server{c: c, place: placeIn(c.Queue), lines: peer.NewLines(c.Logger), running: make(chan struct{}, maxRunning)}
	if err := c.Check(); err != nil {
		return nil, err
	}
	l, err := s.place.listen()
	if err != nil {
		return nil, err
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.node = peer.New(peer.Config{
		Identity: peer.Identity{Cluster: c.ID, ID: c.ID, Name: serverName}, Formats: peer.Formats{Newest: c.Format, Least: c.Format},
		Listener: listener{l, s.lines}, Handler: s.handle, Logger: c.Logger,
		Bounds: peer.Bounds{
			// A call counts until all that is written together with its answer is: by then, a
			// program may have made as many again.
			Connections: maxConnections, Calls: 2 * (maxCalls + maxSubscriptions), Body: c.Body, Large: maxLarge, Queued: maxQueued, Idle: idle,
		},
	})
	return s, nil
}

// Socket is the path of the socket.
func (s *Server) Socket() string { return s.place.socket() }

// Close ends all connections and the calls under way, waits for them, and removes the socket,
// unless another directory is where that of the queue was: the socket there is of another process.
func (s *Server) Close() error {
	s.cancel(base.ErrNotServed)
	err := s.node.Close()
	s.lines.Close()
	s.calls.Wait()
	s.background.Wait()
	if lost := s.c.Check(); lost != nil {
		return errors.Join(err, lost, s.place.removeShort())
	}
	return errors.Join(err, s.place.remove())
}

// handle begins to answer a request.
func (s *Server) handle(r *peer.Request) {
	ctx, cancel := context.WithCancel(s.ctx)
	r.OnCancel(cancel)
	s.calls.Go(func() {
		const what = "call of a local client"
		defer cancel()
		guard.Contain(s.c.Logger, what, func() { s.answer(ctx, r) }, func(value any, stack []byte) {
			r.Fail(s.c.EncodeError(s.c.PanicError(what, value, stack)))
		})
	})
}

func (s *Server) answer(ctx context.Context, r *peer.Request) {
	reply, err := s.serve(ctx, r)
	if err != nil {
		r.Fail(s.c.EncodeError(err))
		return
	}
	r.Reply(reply)
}

func (s *Server) serve(ctx context.Context, r *peer.Request) ([]byte, error) {
	if r.Introduction {
		return nil, errors.New("codeq: an introduction, which is between nodes")
	}
	if !takesLong(r.Kind, s.c.Waits) {
		select {
		case s.running <- struct{}{}:
			r.OnSent(func() { <-s.running })
		case <-ctx.Done():
			return nil, base.EndOf(ctx)
		}
	}
	switch {
	case r.Kind < ofProcess:
		return s.c.Serve(ctx, r.Kind, r.Body)
	case r.Kind == Subscribe:
		return s.subscribe(ctx, r.Body)
	case r.Kind == Events:
		return s.subs.next(ctx, r.Body)
	case r.Kind == Unsubscribe:
		return s.subs.unsubscribe(r.Body)
	}
	if verb := s.c.Verbs[r.Kind]; verb != nil {
		return verb(ctx, r.Body)
	}
	return nil, errMalformed
}

// takesLong reports whether calls of a kind may take long. waits says so of those that are about a
// shard.
func takesLong(kind byte, waits func(kind byte) bool) bool {
	if kind < ofProcess {
		return waits(kind)
	}
	return kind >= ofWaits
}

// listener accepts connections of the own user, and of root.
type listener struct {
	net.Listener
	lines *peer.Lines
}

// Accept is net.Listener's.
func (l listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if err = check(c, func(user int) bool { return ownUser(user) || user == 0 }); err == nil {
			return c, nil
		}
		l.lines.Log(slog.LevelWarn, "local connection not accepted", "", "socket", l.Addr(), "err", err)
		_ = c.Close()
	}
}

// check makes sure that the user at the other end of a connection is good, if the system names it.
func check(c net.Conn, good func(user int) bool) error {
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	var user int
	var failure error
	if err := raw.Control(func(fd uintptr) { user, failure = userOf(fd) }); err != nil {
		return err
	}
	switch {
	case failure != nil:
		return failure
	case user >= 0 && !good(user):
		return fmt.Errorf("%w: user %d at the other end of the socket", os.ErrPermission, user)
	}
	return nil
}
