package failstop

import (
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/guard"
)

// GetDiskUsage asks on a goroutine of its own, one at a time for each name. When that has been
// under way for usagePatience, it returns the last answer: a caller that asks again and again waits
// only once.
func (fs *watchFS) GetDiskUsage(name string) (vfs.DiskUsage, error) {
	p := fs.part(name)
	if p == nil {
		return fs.FS.GetDiskUsage(name)
	}
	q := p.freeSpaceOf(name, fs.FS)
	answered, began := q.ask()
	t := time.NewTimer(usagePatience - time.Since(began))
	defer t.Stop()
	select {
	case <-answered:
	case <-t.C:
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.usage, q.err
}

const usagePatience = time.Second

// freeSpace is the last answer of a file system, and the question that is under way.
type freeSpace struct {
	part *Part
	fs   vfs.FS
	name string

	mu     sync.Mutex    // guards the fields below
	asking chan struct{} // closed when the question ends; nil: none is under way
	asked  time.Time     // when it began
	usage  vfs.DiskUsage
	err    error
}

// freeSpaceOf returns the entry of a name. A part has few names.
func (p *Part) freeSpaceOf(name string, fs vfs.FS) *freeSpace {
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.usages[name]
	if q == nil {
		if p.usages == nil {
			p.usages = make(map[string]*freeSpace)
		}
		q = &freeSpace{part: p, fs: fs, name: name, err: vfs.ErrUnsupported}
		p.usages[name] = q
	}
	return q
}

// ask asks for the free space, unless that is under way. It returns a channel that is closed at the
// end of the question, and when the question began.
func (q *freeSpace) ask() (answered <-chan struct{}, began time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.asking == nil {
		q.asking, q.asked = make(chan struct{}), time.Now()
		w := q.part.watch
		w.questions.Go(func() { guard.Contain(w.log, "free space", q.answer, nil) })
	}
	return q.asking, q.asked
}

// answer asks the file system, and ends the question.
func (q *freeSpace) answer() {
	u, err := vfs.DiskUsage{}, vfs.ErrUnsupported
	defer func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.usage, q.err = u, err
		close(q.asking)
		q.asking = nil
	}()
	defer q.part.end(q.part.begin("statfs", q.name))
	u, err = q.fs.GetDiskUsage(q.name)
}

// End waits for questions that are under way.
func (w *Watch) End() { w.questions.Wait() }
