package peer

import (
	"bufio"
	"context"
	"io"
	"net"
	"runtime"
	"sync"
	"time"
)

const (
	writeChunk  = 1 << 20  // bytes of one Write, each with Config.Timeout
	keepBuffer  = 1 << 20  // larger buffers are left to the garbage collector
	readBuffer  = 64 << 10 // bytes that a reader takes from the network at once
	gatherBytes = 64 << 10 // with fewer queued bytes, the writer yields so that others append more
	queuedBytes = 64 << 20 // with more of them queued, calls wait
)

// stream is the common part of both sides of a connection of calls. Frames are appended to one
// buffer while the writer, a separate goroutine, writes the other one.
//
// Bytes are counted from the beginning of the connection. Invariant: written <= handed <= appended.
// The other side has not seen a frame if some of its bytes were not handed to conn.
type stream struct {
	conn    net.Conn
	timeout time.Duration // of one Write
	ended   func()        // called once by fail, without mu and before conn is closed; or nil
	sent    func()        // called with mu held when written has grown; or nil

	mu       sync.Mutex
	wake     sync.Cond     // of mu; the writer waits for bytes, or for err
	queue    []byte        // appended and not yet taken by the writer
	room     chan struct{} // non-nil while calls wait for room in queue; closed when there is
	appended uint64
	handed   uint64
	written  uint64
	err      error // non-nil once the stream has ended: the reason

	pings   uint64        // pings that were appended
	pongs   uint64        // that have come; the other side answers pings in their order
	pong    chan struct{} // non-nil while a goroutine waits for the next pong; closed when it comes
	pingEnd uint64        // end of the last ping's frame
	pingOut time.Time     // when it was written; zero if it is not, or there is none
}

func (s *stream) init(conn net.Conn, timeout time.Duration) {
	s.conn, s.timeout = conn, timeout
	s.wake.L = &s.mu
}

// append queues a frame. REQUIRES: mu is held, err is nil.
func (s *stream) append(typ, code byte, number uint64, body []byte) {
	s.queue = appendFrame(s.queue, typ, code, number, body)
	s.appended += uint64(frameHead + len(body))
	s.wake.Signal()
}

// send queues a frame without waiting for room. It is dropped if the stream has ended.
func (s *stream) send(typ, code byte, number uint64, body []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.append(typ, code, number, body)
	}
}

// fail ends the stream for the reason err, if it has not ended yet.
func (s *stream) fail(err error) {
	s.mu.Lock()
	first := s.err == nil
	if first {
		s.err = err
		s.queue = nil
		s.openRoom()
		s.wakePing()
		s.wake.Signal()
	}
	s.mu.Unlock()
	if !first {
		return
	}
	if s.ended != nil {
		s.ended()
	}
	_ = s.conn.Close()
}

// ping queues a ping. REQUIRES: mu is held, err is nil.
func (s *stream) ping() {
	s.pings++
	s.append(framePing, 0, 0, nil)
}

// ponged counts the answer to a ping.
func (s *stream) ponged() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pongs++
	s.wakePing()
}

// wakePing wakes the goroutines that wait for a pong. REQUIRES: mu is held.
func (s *stream) wakePing() {
	if s.pong != nil {
		close(s.pong)
		s.pong = nil
	}
}

// answers reports whether the other side answers a ping that is sent now, before ctx ends.
func (s *stream) answers(ctx context.Context) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return false
	}
	s.ping()
	for number := s.pings; s.pongs < number; {
		if s.err != nil || ctx.Err() != nil {
			return false
		}
		if s.pong == nil {
			s.pong = make(chan struct{})
		}
		next := s.pong
		s.mu.Unlock()
		select {
		case <-next:
		case <-ctx.Done():
		}
		s.mu.Lock()
	}
	return true
}

// openRoom wakes the callers that wait for room. REQUIRES: mu is held.
func (s *stream) openRoom() {
	if s.room != nil {
		close(s.room)
		s.room = nil
	}
}

// write is the goroutine that writes. It returns when the stream has ended.
func (s *stream) write() {
	var spare []byte
	for {
		out := s.take(spare)
		for rest := out; len(rest) > 0; {
			chunk := rest[:min(len(rest), writeChunk)]
			rest = rest[len(chunk):]
			if !s.hand(len(chunk)) {
				return
			}
			err := s.conn.SetWriteDeadline(time.Now().Add(s.timeout))
			if err == nil {
				_, err = s.conn.Write(chunk)
			}
			if err != nil {
				s.fail(err)
				return
			}
		}
		if out == nil {
			return
		}
		if spare = out[:0]; cap(spare) > keepBuffer {
			spare = nil
		}
	}
}

// take waits for bytes and swaps them for the empty slice into. It returns nil if the stream has
// ended.
//
// The goroutine that appended the first bytes is probably one of many that run now, so take yields
// the processor while the queue grows. In BenchmarkCall this doubles the throughput of 32 callers
// and more.
func (s *stream) take(into []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noteWritten()
	for len(s.queue) == 0 && s.err == nil {
		s.wake.Wait()
	}
	for seen := 0; seen < len(s.queue) && seen < gatherBytes; {
		seen = len(s.queue)
		s.mu.Unlock()
		runtime.Gosched()
		s.mu.Lock()
	}
	if s.err != nil {
		return nil
	}
	out := s.queue
	s.queue = into
	s.openRoom()
	return out
}

// hand reports whether the next n bytes may be handed to conn: the stream has not ended.
func (s *stream) hand(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noteWritten()
	if s.err != nil {
		return false
	}
	s.handed += uint64(n)
	return true
}

// noteWritten is called by the writer when Write has written all bytes of hand. REQUIRES: mu is
// held.
func (s *stream) noteWritten() {
	s.written = s.handed
	if s.sent != nil {
		s.sent()
	}
	if s.pingOut.IsZero() && s.pingEnd > 0 && s.pingEnd <= s.written {
		s.pingOut = time.Now()
	}
}

// readFrames calls receive for each frame until the connection has ended; an error of receive, or
// of admit (readFrame), ends it.
func (s *stream) readFrames(from io.Reader, admit func(length int) error, receive func(frame) error) {
	r := bufio.NewReaderSize(from, readBuffer)
	for {
		f, err := readFrame(r, admit)
		if err == nil {
			err = receive(f)
		}
		if err != nil {
			s.fail(err)
			return
		}
	}
}
