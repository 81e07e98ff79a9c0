package codeqweb

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// An answer is buffered before it is sent, so that a slow reader does not hold a place in
// Dashboard.busy.

const (
	answerWrite    = 10 * time.Second // for one part; a slower reader is disconnected
	answerPart     = 256 << 10        // bytes
	requestsOfUser = 32               // at a time; a request ends when its answer has been read
	streamsOfUser  = 64
)

// answer buffers the answer to a request. A stream is not buffered.
type answer struct {
	w         http.ResponseWriter
	r         *http.Request
	status    int // 0: 200
	body      bytes.Buffer
	streaming bool
}

func (a *answer) Header() http.Header { return a.w.Header() }

func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

func (a *answer) Write(b []byte) (int, error) {
	if a.streaming {
		return a.w.Write(b)
	}
	return a.body.Write(b)
}

// Unwrap is for http.ResponseController.
func (a *answer) Unwrap() http.ResponseWriter { return a.w }

// underlying returns the server's ResponseWriter: with it, http.MaxBytesReader closes the
// connection of a request that is too large.
func underlying(w http.ResponseWriter) http.ResponseWriter {
	if a, ok := w.(*answer); ok {
		return a.w
	}
	return w
}

// send sends the answer, part by part, each with its deadline. The server sends the rest after the
// handler has returned, under the last deadline.
func (a *answer) send() {
	if a.streaming {
		return
	}
	control := http.NewResponseController(a.w)
	rest := a.pack()
	if a.Header().Get("Content-Length") == "" {
		a.Header().Set("Content-Length", strconv.Itoa(len(rest)))
	}
	if a.status != 0 {
		a.w.WriteHeader(a.status)
	}
	for {
		if err := bounded(control, answerWrite, func() error {
			n, err := a.w.Write(rest[:min(len(rest), answerPart)])
			rest = rest[n:]
			if err == nil {
				if err = control.Flush(); errors.Is(err, http.ErrNotSupported) {
					err = nil // a middleware hides it: the server flushes at the end
				}
			}
			return err
		}); err != nil || len(rest) == 0 {
			return
		}
	}
}

// packFrom is the size from that on an answer is compressed.
const packFrom = 1 << 10

// pack returns the body to send: none if the client has it, or else compressed if that is worth it.
// Downloads of payloads stay as they are.
func (a *answer) pack() []byte {
	body, h := a.body.Bytes(), a.Header()
	kind, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	if a.r.Method == http.MethodGet && (kind == "text/html" || kind == "application/json") && (a.status == 0 || a.status == http.StatusOK) {
		tag := fmt.Sprintf(`W/"%.12x"`, sha256.Sum256(body))
		if h.Set("ETag", tag); a.r.Header.Get("If-None-Match") == tag {
			a.status = http.StatusNotModified
			return nil
		}
	}
	if len(body) < packFrom || h.Get("Content-Encoding") != "" || kind != "text/html" && kind != "application/json" {
		return body
	}
	if h.Add("Vary", "Accept-Encoding"); !takesGzip(a.r) {
		return body
	}
	h.Set("Content-Encoding", "gzip")
	w := packers.Get().(*gzip.Writer)
	defer packers.Put(w)
	return packed(body, w)
}

// bounded sets a deadline for a write, and does not reset it. A server without support for
// deadlines has its own.
func bounded(control *http.ResponseController, d time.Duration, write func() error) error {
	if err := control.SetWriteDeadline(time.Now().Add(d)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return write()
}

// users counts the requests, streams and searches of each user.
type users struct {
	mu                          sync.Mutex
	requests, streams, searches map[string]int
}

var errYours = &refusal{http.StatusTooManyRequests, "busy", "too many requests of one user at a time; Options.User says who that is"}

// enter counts a request of a user in one of the maps, until leave is called.
func (u *users) enter(of *map[string]int, user string, most int) (leave func(), err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if (*of)[user] >= most {
		return nil, errYours
	}
	if *of == nil {
		*of = make(map[string]int)
	}
	(*of)[user]++
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		if (*of)[user]--; (*of)[user] == 0 {
			delete(*of, user)
		}
	}, nil
}

// userOf returns the user of a request: by Options.User, or else the address.
func (d *Dashboard) userOf(r *http.Request) (user, name string, err error) {
	if d.opts.User != nil {
		err = contained("Options.User", func() { name = d.opts.User(r) })
		return name, name, err
	}
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		return host, "", nil
	}
	return r.RemoteAddr, "", nil
}
