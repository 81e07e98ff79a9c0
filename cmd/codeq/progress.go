package main

import (
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/term"
)

// progress tells people now and then how far a long run of a command is: each second on a terminal,
// and else after 1, 2, 4 ... seconds, but once in a minute.
type progress struct {
	a     *app
	begun time.Time
	last  atomic.Pointer[step]
	once  sync.Once
	stop  chan struct{} // closed by end
	ended chan struct{} // closed by run
}

// step is how far a run is.
type step struct {
	what        string
	done, total uint64
}

// mostRarely is the longest time between two notes.
const mostRarely = time.Minute

// progress begins to tell, until end is called.
func (a *app) progress() *progress {
	p := &progress{a: a, begun: time.Now(), stop: make(chan struct{}), ended: make(chan struct{})}
	p.last.Store(&step{what: "beginning"})
	go p.run()
	return p
}

// tell notes how far the run is.
func (p *progress) tell(what string, done, total uint64) { p.last.Store(&step{what, done, total}) }

func (p *progress) run() {
	defer close(p.ended)
	f, isFile := p.a.err.(*os.File)
	terminal := isFile && term.IsTerminal(int(f.Fd()))
	next := time.Second
	for {
		select {
		case <-p.stop:
			return
		case <-time.After(time.Until(p.begun.Add(next))):
		}
		if s := p.last.Load(); s.total > 0 {
			p.a.note("codeq: %v: %s: %d of %d tasks", next, s.what, s.done, s.total)
		} else {
			p.a.note("codeq: %v: %s", next, s.what)
		}
		if terminal {
			next += time.Second
		} else {
			next += min(next, mostRarely)
		}
	}
}

// end waits until nothing more is told. It may be called again.
func (p *progress) end() {
	p.once.Do(func() { close(p.stop) })
	<-p.ended
}
