package engine

import "codeq/internal/ready"

// How claims find a ready task: in the window of its lane, which is in a ring, or later on disk.

// ready counts a task as ready and offers it to claims; its record is in the group.
func (s *State) ready(l *Lane, it ready.Item) {
	l.queue.Counts.Ready++
	s.touch(l.queue)
	before := l.spilled
	if s.cache(l, it); before < deepLane && l.spilled >= deepLane {
		s.Store.AddDeepLane(l.number)
	}
	s.joinRing(l)
	s.feed(l.queue)
}

// cache adds a ready task to its lane's window if it belongs there, and memory has room for it.
func (s *State) cache(l *Lane, it ready.Item) {
	if !l.reaches(it.Pos) {
		l.weigh(len(it.Record))
		return // on disk, where the window reaches it later
	}
	w := &l.window
	last := w.IsLast(it.Pos)
	if l.complete && last && (w.Len() >= s.config.WindowTasks || !s.windows.admits(l, cap(it.Record))) {
		l.spill(it.Pos, len(it.Record))
		return
	}
	before := w.Footprint()
	if last {
		w.Append(it)
	} else {
		w.Insert(it)
	}
	if w.Len() > s.config.WindowTasks {
		last := w.PopLast()
		l.spill(last.Pos, len(last.Record))
	}
	s.windows.resized(l, before)
	s.windows.shrink()
}
