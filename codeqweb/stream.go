package codeqweb

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"codeq"
)

// Streams of server-sent events: page updates from the sampler (HTML), and the events of tasks
// (JSON).
const (
	maxStreams    = 256 // at a time, of both kinds
	streamLasts   = 10 * time.Minute
	streamWrite   = 10 * time.Second // for one message; a slower reader is disconnected
	streamComment = 10 * time.Second // between two signs of life, and two questions for the access
)

// viewer is an open page with its stream.
type viewer struct {
	topic string      // path and query of the page; "": it has no live part
	mail  chan []byte // capacity 1: the latest message; an unread one is dropped
}

// viewers has all viewers. publish waits for none of them.
type viewers struct {
	render func(topic string) []byte // nil: nothing

	mu     sync.Mutex
	set    map[*viewer]struct{}
	closed bool
	number uint64 // of messages
}

// join adds a viewer; false: the dashboard has ended.
func (v *viewers) join(w *viewer) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return false
	}
	if v.set == nil {
		v.set = make(map[*viewer]struct{})
	}
	v.set[w] = struct{}{}
	return true
}

func (v *viewers) leave(w *viewer) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.set, w)
}

func (v *viewers) count() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.set)
}

// close ends all streams.
func (v *viewers) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	for w := range v.set {
		close(w.mail)
	}
	v.set = nil
}

// publish sends a new sample to all viewers. Each topic is rendered once for all its viewers.
func (v *viewers) publish(*sample) {
	v.mu.Lock()
	topics := make(map[string][]byte)
	for w := range v.set {
		topics[w.topic] = nil
	}
	v.number++
	number := v.number
	v.mu.Unlock()
	for topic := range topics {
		m := event("tick", strconv.AppendUint(nil, number, 10))
		if topic != "" {
			if html := v.render(topic); html != nil {
				m = append(event("live", html), m...)
			}
		}
		topics[topic] = m
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for w := range v.set {
		m, ok := topics[w.topic]
		if !ok { // it joined meanwhile
			continue
		}
		select {
		case <-w.mail: // an unread message is old
		default:
		}
		w.mail <- m
	}
}

// event writes a message in the form of server-sent events.
func event(kind string, data []byte) []byte {
	b := []byte("event: " + kind + "\n")
	for part := range bytes.SplitSeq(bytes.ReplaceAll(data, []byte("\r"), nil), []byte("\n")) {
		b = append(append(append(b, "data: "...), part...), '\n')
	}
	return append(b, '\n')
}

var errStreams = &refusal{http.StatusServiceUnavailable, "busy", "too many streams"}

// stream is an answer of server-sent events.
type stream struct {
	w       http.ResponseWriter
	control *http.ResponseController
}

// streamHead sets the headers of a stream.
func streamHead(w http.ResponseWriter) {
	if a, ok := w.(*answer); ok {
		a.streaming = true
	}
	h := w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("X-Accel-Buffering", "no")
}

// openStream begins a stream. The caller calls the returned function at the end.
func (d *Dashboard) openStream(w http.ResponseWriter) (*stream, func(), error) {
	if d.streams.Add(1) > maxStreams {
		d.streams.Add(-1)
		return nil, nil, errStreams
	}
	streamHead(w)
	s := &stream{w, http.NewResponseController(w)}
	if err := s.send([]byte("retry: 2000\n\n")); err != nil {
		d.streams.Add(-1)
		return nil, nil, err
	}
	return s, func() {
		s.end()
		d.streams.Add(-1)
	}, nil
}

// send writes a message within streamWrite, and then removes the deadline: HTTP/2 ends a stream
// when its deadline passes.
func (s *stream) send(m []byte) error {
	err := bounded(s.control, streamWrite, func() error {
		if _, err := s.w.Write(m); err != nil {
			return err
		}
		return s.control.Flush()
	})
	if err == nil {
		_ = s.control.SetWriteDeadline(time.Time{})
	}
	return err
}

// end sets a deadline for the server's last write of the stream.
func (s *stream) end() { _ = bounded(s.control, streamWrite, func() error { return nil }) }

// mayFollow reports whether a request still has the access that its stream began with.
func (d *Dashboard) mayFollow(r *request) bool {
	now, err := d.accessOf(r.Request)
	return err == nil && now == r.access
}

// live streams the samples to a page.
func (d *Dashboard) live(w http.ResponseWriter, r *request) error {
	if r.Method == http.MethodHead {
		streamHead(w)
		return nil
	}
	v := &viewer{topic: d.topic(r.URL.Query()), mail: make(chan []byte, 1)}
	s, done, err := d.openStream(w)
	if err != nil {
		return err
	}
	defer done()
	if !d.sampler.viewers.join(v) {
		return nil
	}
	defer d.sampler.viewers.leave(v)
	select { // the sampler may sleep until the next minute
	case d.sampler.wake <- struct{}{}:
	default:
	}
	ends := time.NewTimer(streamLasts)
	defer ends.Stop()
	ask := time.NewTicker(streamComment)
	defer ask.Stop()
	for {
		select {
		case m, ok := <-v.mail:
			if !ok || s.send(m) != nil {
				return nil
			}
		case <-ask.C:
			if !d.mayFollow(r) {
				return nil
			}
		case <-ends.C:
			return nil
		case <-r.Context().Done():
			return nil
		}
	}
}

// topic returns the canonical path and query of a page; "": a page without a live part.
func (d *Dashboard) topic(p url.Values) string {
	switch p.Get("page") {
	case "overview":
		return "overview?" + overviewQuery(p).Encode()
	case "queue":
		return "queue?" + url.Values{"name": {p.Get("name")}}.Encode()
	}
	return ""
}

// renderTopic renders the live part of a page.
func (d *Dashboard) renderTopic(topic string) []byte {
	screen, query, _ := strings.Cut(topic, "?")
	p, err := url.ParseQuery(query)
	if err != nil {
		return nil
	}
	var b bytes.Buffer
	switch screen {
	case "overview":
		err = d.templates["overview"].ExecuteTemplate(&b, "live", d.overview(d.sampler.current(), p))
	case "queue":
		err = d.templates["queue"].ExecuteTemplate(&b, "live", d.queueLive(d.sampler.current(), p.Get("name")))
	}
	if err != nil {
		return nil
	}
	return b.Bytes()
}

// events streams the events of tasks.
func (d *Dashboard) events(w http.ResponseWriter, r *request) error {
	var opts codeq.SubscribeOptions
	opts.Queues, opts.Buffer = r.params["queue"], 4096
	for _, text := range r.params["kind"] {
		var kind codeq.EventKind
		if err := kind.UnmarshalText([]byte(text)); err != nil {
			return err
		}
		opts.Kinds = append(opts.Kinds, kind)
	}
	if r.Method == http.MethodHead {
		streamHead(w)
		return nil
	}
	if d.streams.Load() >= maxStreams {
		return errStreams
	}
	sub, err := d.q.Subscribe(opts)
	if err != nil {
		return err
	}
	defer sub.Close()
	s, done, err := d.openStream(w)
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := d.until(r.Context(), streamLasts)
	defer cancel()
	return d.copyEvents(ctx.Done(), s, sub, r)
}

// copyEvents writes events until a write fails, the queue ends, the access changes, or the time is
// over. Between them it writes comments, so that it notices a closed connection.
func (d *Dashboard) copyEvents(ends <-chan struct{}, s *stream, sub *codeq.Subscription, r *request) error {
	lost, next := uint64(0), make(chan codeq.Event)
	var failed atomic.Pointer[error]
	var reading sync.WaitGroup
	stop := make(chan struct{})
	reading.Go(func() {
		defer close(next)
		for {
			e, err := sub.Next(d.ctx)
			if err != nil {
				failed.Store(&err)
				return
			}
			select {
			case next <- e:
			case <-stop:
				return
			}
		}
	})
	defer reading.Wait()
	defer sub.Close()
	defer close(stop)
	alive := time.NewTicker(streamComment)
	defer alive.Stop()
	for {
		var m []byte
		select {
		case e, ok := <-next:
			if !ok {
				if err := *failed.Load(); d.ctx.Err() == nil || errors.Is(err, codeq.ErrClosed) {
					text, _ := json.Marshal(refusalOf(err).body())
					_ = s.send(event("end", text))
				}
				return nil
			}
			if d.opts.Redact != nil {
				t := codeq.TaskInfo{ID: e.ID, Task: codeq.Task{Queue: e.Queue, Tenant: e.Tenant}, Attempts: e.Attempt, LastError: e.LastError, Progress: e.Progress}
				d.redact(&t)
				e.Tenant, e.LastError, e.Progress = t.Tenant, t.LastError, t.Progress
			}
			if !r.access.Has(Payloads) {
				e.Progress.Note = ""
			}
			text, err := json.Marshal(e)
			if err != nil {
				return nil
			}
			if n := sub.Lost(); n != lost {
				lost = n
				m = event("lost", fmt.Append(nil, n))
			}
			m = append(m, event("task", text)...)
		case <-alive.C:
			if !d.mayFollow(r) {
				return nil
			}
			m = []byte(":\n\n")
		case <-ends:
			return nil
		}
		if s.send(m) != nil {
			return nil
		}
	}
}
