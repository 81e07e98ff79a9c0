package peer

import (
	"fmt"
	"strconv"
)

// Request is a call as its Handler sees it. The Handler may keep it and read its fields; nobody
// else uses Body.
type Request struct {
	From Identity // of the caller
	// Introduction is whether the caller need not be of this node's cluster.
	Introduction bool
	Kind         byte
	Body         []byte

	number uint64
	conn   *server
	// Guarded by conn.mu.
	answered bool
	cancel   func()
}

// Reply answers the request. It neither blocks nor keeps body. Only the first of several answers,
// by Reply or Fail, counts; it is dropped if the caller has given up or the connection has ended.
func (r *Request) Reply(body []byte) {
	if len(body) > MaxBody {
		r.Fail(CodePeer, "reply of "+strconv.Itoa(len(body))+" bytes is too large")
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
	if c.err == nil {
		c.append(typ, code, r.number, body)
	}
}

// OnCancel makes f the function that is called when the caller gives up or the connection ends,
// unless the request was answered before. The Handler must call OnCancel before it returns, at most
// once. The connection's reader calls f, which must not block, perhaps while somebody answers.
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
	from    Identity
	handler func(*Request)
	// introduction is Request.Introduction.
	introduction bool
	last         uint64 // number of the last request

	// cancels are the unanswered requests with an OnCancel, by number. Guarded by mu. Only the
	// reader, which runs the Handler, adds any.
	cancels map[uint64]*Request
}

// read is the goroutine that reads.
func (c *server) read() {
	defer c.cancelAll()
	c.readFrames(c.conn, c.receive)
}

// cancelAll tells the Handler that nobody waits for answers any more.
func (c *server) cancelAll() {
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
		c.handler(&Request{From: c.from, Introduction: c.introduction, Kind: f.code, Body: f.body, number: f.number, conn: c})
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
	default:
		return fmt.Errorf("%w: frame of type %d from a caller", errProtocol, f.typ)
	}
	return nil
}
