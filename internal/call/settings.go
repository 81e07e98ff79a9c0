package call

import (
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Settings reads the settings of a queue.
type Settings struct {
	Queue string
	Value []byte // the answer; nil: there are none
}

func (b *Settings) Decide(s *engine.State) (engine.Verdict, error) {
	if q := s.Names.Queues[b.Queue]; q != nil && q.Version > 0 {
		b.Value = q.Value
	} else if s.Names.Given > 0 { // the next version is one that no shard has removed
		b.Value = keys.SettingsValue{Version: s.Names.Given, JSON: keys.GivenSettings}.Append(nil)
	}
	return engine.Decided, nil
}

// Configured returns the answer, which the caller may change.
func (b *Settings) Configured() (engine.Configured, error) {
	if b.Value == nil {
		return engine.Configured{Settings: new(record.Settings)}, nil
	}
	return engine.ParseSettings(b.Value)
}

func (b *Settings) Append(dst []byte) []byte      { return wire.AppendBytes(dst, b.Queue) }
func (b *Settings) Read(r *wire.Reader)           { b.Queue = r.String() }
func (b *Settings) AppendReply(dst []byte) []byte { return append(dst, b.Value...) }

func (b *Settings) ReadReply(r *wire.Reader) {
	if r.Len() > 0 {
		b.Value = r.Rest()
	}
}

func (b *Settings) Again() { b.Value = nil }

// Configure stores settings of a queue in the first shard, which sends them to the others, if their
// version is the next one.
type Configure struct {
	Queue string
	Value []byte
	Late  bool // the answer: other settings were stored first
}

func (b *Configure) Decide(s *engine.State) (v engine.Verdict, err error) {
	b.Late, err = s.Configure(b.Queue, b.Value)
	return engine.Decided, err
}

// HasPolicy reports whether the settings have what older formats do not.
func (b *Configure) HasPolicy() bool {
	c, err := engine.ParseSettings(b.Value)
	return err == nil && c.Settings.HasPolicy()
}

func (b *Configure) Append(dst []byte) []byte {
	return wire.AppendBytes(wire.AppendBytes(dst, b.Queue), b.Value)
}

func (b *Configure) Read(r *wire.Reader)           { b.Queue, b.Value = r.String(), r.Bytes() }
func (b *Configure) AppendReply(dst []byte) []byte { return wire.AppendBool(dst, b.Late) }
func (b *Configure) ReadReply(r *wire.Reader)      { b.Late = r.Bool() }
func (b *Configure) Again()                        { b.Late = false }

// Adopt makes a shard adopt settings that the first one has stored.
type Adopt struct {
	Silent
	Queue string
	Value []byte
}

func (b *Adopt) Decide(s *engine.State) (engine.Verdict, error) {
	return engine.Decided, s.Names.Adopt(b.Queue, b.Value)
}

func (b *Adopt) Append(dst []byte) []byte {
	return wire.AppendBytes(wire.AppendBytes(dst, b.Queue), b.Value)
}

func (b *Adopt) Read(r *wire.Reader) { b.Queue, b.Value = r.String(), r.Bytes() }
