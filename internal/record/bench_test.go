package record

import "testing"

// benchRecords are the record of most tasks, and one with every field.
func benchRecords() map[string][]byte {
	plain := Record{Payload: make([]byte, 200)}
	retried := Record{Head: Head{Attempts: 2, Leases: 3}, Payload: make([]byte, 200)}
	full := Record{
		Head: Head{
			Attempts: 2, Leases: 3, MaxAttempts: 9, Lease: 30_000, Timeout: 10_000, Retention: -1, RunAt: 1 << 40,
			Ties: Ties{Unique: [UniqueLen]byte{1}, UniqueFor: 1000, Group: 7, Limit: 8},
		},
		Error: "failed", Headers: map[string]string{"trace": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
		UniqueKey: "key", GroupKey: "group", LimitKey: "limit", Parents: make([][IDLen]byte, 2), Payload: make([]byte, 200),
	}
	return map[string][]byte{"plain": plain.Encode(), "retried": retried.Encode(), "full": full.Encode()}
}

func BenchmarkDecodeHead(b *testing.B) {
	for name, rec := range benchRecords() {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := DecodeHead(rec); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	for name, rec := range benchRecords() {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Decode(rec); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
