package localsocket

import (
	"context"
	"encoding/json"
	"errors"
)

// The kinds of calls that are about the process and not a shard. Arguments and answers are JSON.
const (
	// These answer at once.
	Limits      byte = 128
	Storage     byte = 129
	Status      byte = 130
	Subscribe   byte = 131
	Unsubscribe byte = 132
	Workers     byte = 133
	Process     byte = 134
	Health      byte = 135

	// These may take long, have small answers, and change nothing.
	Ready  byte = 160
	Events byte = 161

	// These change something, and are like those otherwise.
	Checkpoint    byte = 192
	AddNode       byte = 193
	RemoveNode    byte = 194
	ReplaceNode   byte = 195
	Transfer      byte = 196
	Drain         byte = 197
	Undrain       byte = 198
	QuietWorkers  byte = 199
	ResumeWorkers byte = 200
	FullCopy      byte = 201 // Checkpoint with CheckpointOptions.Copy
)

// From where on kinds are what.
const (
	ofProcess = 128
	ofWaits   = 160
	ofChanges = 192
)

// errMalformed is the answer to a call that cannot be read.
var errMalformed = errors.New("codeq: malformed call of another program")

// Verb carries out a call that is about the process.
type Verb func(ctx context.Context, argument []byte) (answer []byte, err error)

// Verbs are those of a process, by their kinds.
type Verbs map[byte]Verb

// Answering returns a Verb with an answer.
func Answering[A, R any](verb func(context.Context, A) (R, error)) Verb {
	return func(ctx context.Context, argument []byte) ([]byte, error) {
		var a A
		if json.Unmarshal(argument, &a) != nil {
			return nil, errMalformed
		}
		answer, err := verb(ctx, a)
		if err != nil {
			return nil, err
		}
		return json.Marshal(answer)
	}
}

// Obeying returns a Verb without an answer.
func Obeying[A any](verb func(context.Context, A) error) Verb {
	return Answering(func(ctx context.Context, a A) (struct{}, error) { return struct{}{}, verb(ctx, a) })
}
