package call

import (
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/recurrence"
	"codeq/internal/wire"
)

// SetSchedule stores a schedule.
type SetSchedule struct {
	Silent
	Name  string
	Value keys.ScheduleValue // without a position
	Times recurrence.Sequence
}

func (b *SetSchedule) Decide(s *engine.State) (engine.Verdict, error) {
	return engine.Decided, s.Times.SetSchedule(b.Name, b.Value, b.Times)
}

func (b *SetSchedule) Append(dst []byte) []byte {
	return wire.AppendBytes(wire.AppendBytes(dst, b.Name), b.Value.Append(nil))
}

func (b *SetSchedule) Read(r *wire.Reader) {
	b.Name = r.String()
	var err error
	if b.Value, err = keys.ParseScheduleValue(r.Bytes()); err == nil {
		b.Times, err = recurrence.Of(&b.Value)
	}
	if err != nil {
		r.Fail()
	}
}

// DeleteSchedule removes a schedule.
type DeleteSchedule struct {
	Silent
	Name string
}

func (b *DeleteSchedule) Decide(s *engine.State) (engine.Verdict, error) {
	return engine.Decided, s.Times.DeleteSchedule(b.Name)
}

func (b *DeleteSchedule) Append(dst []byte) []byte { return wire.AppendBytes(dst, b.Name) }
func (b *DeleteSchedule) Read(r *wire.Reader)      { b.Name = r.String() }

// PauseSchedule stops the ticks of a schedule, or resumes them.
type PauseSchedule struct {
	Silent
	Name   string
	Paused bool
}

func (b *PauseSchedule) Decide(s *engine.State) (engine.Verdict, error) {
	return engine.Decided, s.Times.PauseSchedule(b.Name, b.Paused)
}

func (b *PauseSchedule) Append(dst []byte) []byte {
	return wire.AppendBool(wire.AppendBytes(dst, b.Name), b.Paused)
}
func (b *PauseSchedule) Read(r *wire.Reader) { b.Name, b.Paused = r.String(), r.Bool() }

// FindSchedule returns a schedule. Value.Record must only be read.
type FindSchedule struct {
	Name  string
	Value keys.ScheduleValue
}

func (b *FindSchedule) Decide(s *engine.State) (engine.Verdict, error) {
	r, err := s.Times.FindSchedule(b.Name)
	if err == nil {
		b.Value = r.Value
	}
	return engine.Decided, err
}

func (b *FindSchedule) Append(dst []byte) []byte      { return wire.AppendBytes(dst, b.Name) }
func (b *FindSchedule) Read(r *wire.Reader)           { b.Name = r.String() }
func (b *FindSchedule) AppendReply(dst []byte) []byte { return b.Value.Append(dst) }
func (b *FindSchedule) Again()                        {}

func (b *FindSchedule) ReadReply(r *wire.Reader) {
	var err error
	if b.Value, err = keys.ParseScheduleValue(r.Rest()); err != nil {
		r.Fail()
	}
}

// The number of schedules that a shard's owner copies in one group, and about the number of their
// bytes, headers and payloads included.
const (
	SchedulesStep  = 512
	SchedulesBytes = 1 << 20
)

// Schedules copies a part of the schedules of a shard, each converted to a T. Who embeds it adds
// Decide, which calls Copy.
type Schedules[T any] struct {
	After string // the part begins after this name
	More  bool   // there are others after it
	Infos []T
	from  string // this part begins after the name
}

// next prepares to copy the next part.
func (b *Schedules[T]) next() { b.Infos, b.from = nil, b.After }

// All copies all schedules of a shard, part by part: ask carries out b there.
func (b *Schedules[T]) All(ask func() error) (all []T, err error) {
	err = inParts(&b.More, b.next, ask, func() { all = append(all, b.Infos...) })
	return all, err
}

// Copy copies the part. An error of show ends the shard.
func (b *Schedules[T]) Copy(s *engine.State, show func(*recurrence.Schedule) (T, error)) {
	size := 0
	b.More = false
	s.Times.Schedules(b.After, func(r *recurrence.Schedule) bool {
		if b.More = len(b.Infos) == SchedulesStep || size >= SchedulesBytes; b.More {
			return false
		}
		info, err := show(r)
		if err != nil {
			s.Broken = err
			return false
		}
		b.Infos = append(b.Infos, info)
		size += len(r.Value.Record)
		b.After = r.Name
		return true
	})
}

func (b *Schedules[T]) Append(dst []byte) []byte { return wire.AppendBytes(dst, b.After) }
func (b *Schedules[T]) Read(r *wire.Reader)      { b.After = r.String() }

func (b *Schedules[T]) AppendReply(dst []byte) []byte {
	return wire.AppendJSON(wire.AppendBytes(wire.AppendBool(dst, b.More), b.After), b.Infos)
}

func (b *Schedules[T]) ReadReply(r *wire.Reader) {
	b.More, b.After = r.Bool(), r.String()
	r.JSON(r.Rest(), &b.Infos)
}

func (b *Schedules[T]) Again() { b.Infos, b.After = nil, b.from }
