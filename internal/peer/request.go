package peer

import (
	"fmt"
	"net"
	"slices"
	"strconv"
)

// Request is a call at its Handler. The Handler may keep it and read its fields; Body is the
// Handler's alone.
type Request struct {
	From Identity // of the caller
	// Introduction: the caller need not be of this node's cluster.
	Introduction bool
	Kind         byte
	Body         []byte

	number uint64
	conn   *server
	large  bool // it is one of Bounds.Large
	// Guarded by conn.mu.
	answered bool
	cancel   func()
	sent     func()
}

// Reply answers the request. It neither blocks nor keeps body. Only the first of several answers,
// by Reply or Fail, counts; it is dropped if the caller has given up or the connection has ended.
func (r *Request) Reply(body []byte) {
	if len(body) > MaxBody {
		r.Fail(codePeer, "reply of "+strconv.Itoa(len(body))+" bytes is too large")
		return
	}
	r.answer(frameReply, 0, body)
}

// Fail is Reply with a *RemoteError of this code and text for the caller.
func (r *Request) Fail(code byte, text string) {
	r.answer(frameFail, code, []byte(text[:min(len(text), MaxBody)]))
}

func (r *Request) answer(typ, code byte, body []byte) {
	c := r.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.answered {
		return
	}
	r.answered = true
	if r.cancel != nil {
		delete(c.cancels, r.number)
	}
	if r.large {
		<-c.node.large
	}
	if c.err == nil {
		c.append(typ, code, r.number, body)
		c.answers = append(c.answers, answered{c.appended, r.sent})
		return
	}
	c.calls--
	if r.sent != nil {
		r.sent()
	}
}

// OnSent makes f the function that is called when the answer has been passed to the operating
// system, or never will be. The Handler must call it before the request is answered, at most once.
// f must neither block nor use the request.
func (r *Request) OnSent(f func()) {
	r.conn.mu.Lock()
	defer r.conn.mu.Unlock()
	r.sent = f
}

// OnCancel makes f the function that is called when the caller gives up or the connection ends,
// unless the request was answered before. The Handler must call OnCancel before it returns, at most
// once. The connection's reader calls f, which must not block, perhaps during an answer.
func (r *Request) OnCancel(f func()) {
	c := r.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.answered {
		return
	}
	r.cancel = f
	if c.cancels == nil {
		c.cancels = make(map[uint64]*Request)
	}
	c.cancels[r.number] = r
}

// server is the called side of a connection of calls.
type server struct {
	stream
	node *Node
	from Identity
	// introduction is Request.Introduction.
	introduction bool
	last         uint64 // number of the last request
	admitted     bool   // the reader has a place of Bounds.Large for the next request

	// Guarded by mu.
	// cancels are the unanswered requests with an OnCancel, by number. Only the reader, which runs
	// the Handler, adds any.
	cancels map[uint64]*Request
	calls   int        // requests without a written answer
	answers []answered // not written yet, in their order
}

// answered is an answer in the stream.
type answered struct {
	end  uint64 // of its frame
	sent func() // of its request; or nil
}

func newServer(n *Node, h header, conn net.Conn) *server {
	c := &server{node: n, from: h.from, introduction: h.use == useIntroduction}
	c.init(conn, n.c.Timeout)
	c.sent = c.forgetSent
	c.ended = c.forgetAll
	return c
}

// forgetSent forgets the answers that are written. REQUIRES: mu is held.
func (c *server) forgetSent() {
	n := 0
	for n < len(c.answers) && c.answers[n].end <= c.written {
		n++
	}
	c.forgetFirst(n)
}

// forgetAll is called when the stream has ended.
func (c *server) forgetAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetFirst(len(c.answers))
}

func (c *server) forgetFirst(n int) {
	c.calls -= n
	for i := range c.answers[:n] {
		if f := c.answers[i].sent; f != nil {
			f()
		}
	}
	c.answers = slices.Delete(c.answers, 0, n)
}

// read is the goroutine that reads.
func (c *server) read() {
	defer c.cancelAll()
	c.readFrames(c.bounded(), c.admit, c.receive)
}

// cancelAll tells the Handler that no caller waits for answers any more.
func (c *server) cancelAll() {
	if c.admitted {
		<-c.node.large
	}
	c.mu.Lock()
	cancels := c.cancels
	c.cancels = nil
	c.mu.Unlock()
	for _, req := range cancels {
		req.cancel()
	}
}

func (c *server) receive(f frame) error {
	switch f.typ {
	case frameRequest:
		if f.number <= c.last {
			return fmt.Errorf("%w: request %d after %d", errProtocol, f.number, c.last)
		}
		c.last = f.number
		r := &Request{
			From: c.from, Introduction: c.introduction, Kind: f.code, Body: f.body, number: f.number, conn: c, large: c.admitted,
		}
		c.admitted = false
		if !c.count() {
			r.Fail(CodeBusy, "too many calls of one connection at a time")
			return nil
		}
		c.node.c.Handler(r)
	case frameCancel:
		c.mu.Lock()
		req := c.cancels[f.number]
		delete(c.cancels, f.number)
		c.mu.Unlock()
		if req != nil {
			req.cancel()
		}
	case framePing:
		c.send(framePong, 0, 0, nil)
	case framePong:
		c.ponged()
	default:
		return fmt.Errorf("%w: frame of type %d from a caller", errProtocol, f.typ)
	}
	return nil
}
