package localsocket

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/manifest"
	"codeq/internal/peer"
)

// Client calls the process that serves a queue. It connects for its first call, and again after a
// connection has ended. Its methods are safe for concurrent use.
type Client struct {
	node   *peer.Node
	target peer.Target
	decode func(code byte, text string) error
	log    *slog.Logger
	waits  func(kind byte) bool
	// calls has an element for each call under way that does not wait for events; waiting has one
	// for those of them that may take long. So there is always room for the calls that end the
	// waits of others.
	calls, waiting chan struct{}

	mu         sync.Mutex // orders background.Add before the Wait of Close; guards closed
	closed     bool
	background sync.WaitGroup
}

// NewClient returns a Client for the queue in a directory. waits is as in Config. decode reads an
// error that the process has sent.
func NewClient(
	d *manifest.Directory, format int, waits func(kind byte) bool, decode func(code byte, text string) error, log *slog.Logger,
) (*Client, error) {
	id, err := peer.ParseID(d.ID)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", base.ErrCorrupt, manifest.Name, err)
	}
	own := peer.Identity{Cluster: id, Name: clientName}
	_, _ = rand.Read(own.ID[:]) // never fails
	return &Client{
		node: peer.New(peer.Config{
			Identity: own, Formats: peer.Formats{Newest: format, Least: format}, Dial: dial, Logger: log,
		}),
		target: peer.Target{ID: id, Name: serverName, Address: d.Path},
		decode: decode,
		log:    log,
		waits:  waits, calls: make(chan struct{}, maxCalls), waiting: make(chan struct{}, maxWaits),
	}, nil
}

// The pauses before a call is repeated because the process had too many.
const minPause, maxPause = time.Millisecond, 50 * time.Millisecond

// dialError is why there is no connection.
type dialError struct{ err error }

func (e *dialError) Error() string { return e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

func dial(ctx context.Context, queue string) (net.Conn, error) {
	c, err := connect(ctx, queue)
	if err != nil {
		return nil, &dialError{err}
	}
	return c, nil
}

// connect connects to the process that serves the queue in a directory.
func connect(ctx context.Context, queue string) (net.Conn, error) {
	path, owner, err := find(queue)
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	if err := check(c, func(user int) bool { return user == owner }); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Call sends a call and returns its reply. An error that does not match base.ErrUncertain is the
// answer, or says that the call was not served. reads: it changes nothing, and is not uncertain. A
// call waits while the process has as many as it accepts.
func (c *Client) Call(ctx context.Context, kind byte, body []byte, reads bool) ([]byte, error) {
	if kind != Events { // there is one for each subscription at most
		leave, err := c.enter(ctx, kind)
		if err != nil {
			return nil, err
		}
		defer leave()
	}
	var remote *peer.RemoteError
	reply, err := c.node.Call(ctx, c.target, kind, body)
	for pause := minPause; errors.As(err, &remote) && remote.Code == peer.CodeBusy; pause = min(2*pause, maxPause) {
		select { // calls that were given up are still under way there
		case <-time.After(pause):
			reply, err = c.node.Call(ctx, c.target, kind, body)
		case <-ctx.Done():
			return nil, base.EndOf(ctx)
		}
	}
	if err == nil {
		return reply, nil
	}
	var refused *peer.RefusedError
	switch {
	case errors.As(err, &remote):
		return nil, c.decode(remote.Code, remote.Text)
	case !reads && !errors.Is(err, peer.ErrNotSent):
		return nil, fmt.Errorf("%w: %w", base.ErrUncertain, err)
	case ctx.Err() != nil:
		return nil, base.EndOf(ctx)
	case errors.Is(err, peer.ErrClosed):
		return nil, base.ErrClosed
	case errors.As(err, &refused) && refused.Reason == peer.RefusedFormat:
		return nil, fmt.Errorf("%w: the process that serves the queue has another: %w", base.ErrFormat, refused)
	}
	var dialing *dialError
	if errors.As(err, &dialing) {
		err = dialing.err
	} else if refused != nil {
		err = refused
	}
	if errors.Is(err, base.ErrNotServed) || errors.Is(err, fs.ErrPermission) {
		return nil, err
	}
	return nil, fmt.Errorf("%w: %w", base.ErrNotServed, err)
}

// enter waits for the place of a call, which the caller leaves in the end.
func (c *Client) enter(ctx context.Context, kind byte) (leave func(), err error) {
	places := []chan struct{}{c.calls}
	if takesLong(kind, c.waits) {
		places = []chan struct{}{c.waiting, c.calls}
	}
	for i, p := range places {
		select {
		case p <- struct{}{}:
		case <-ctx.Done():
			for _, p := range places[:i] {
				<-p
			}
			return nil, base.EndOf(ctx)
		}
	}
	return func() {
		for _, p := range places {
			<-p
		}
	}, nil
}

// Tell calls a verb that is about the process. reply is where its answer goes, if it is not nil.
func (c *Client) Tell(ctx context.Context, kind byte, argument, reply any) error {
	body, err := json.Marshal(argument)
	if err != nil {
		return err
	}
	b, err := c.Call(ctx, kind, body, kind < ofChanges)
	if err == nil && reply != nil {
		if err = json.Unmarshal(b, reply); err != nil {
			err = fmt.Errorf("%w: %w", base.ErrUncertain, err)
		}
	}
	return err
}

// start runs f on a goroutine. Close waits for it. It returns false after Close.
func (c *Client) start(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.background.Go(f)
	return true
}

// Close ends the Client. Calls under way fail.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	err := c.node.Close()
	c.background.Wait()
	return err
}
