package registry

import "testing"

func TestSizeInWordsIsParsed(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "1": 1, "1024": 1024, "10b": 10, "1k": 1000, "1KB": 1000, "1KiB": 1024, "1 MiB": 1 << 20, "200G": 200e9,
		"1.5GiB": 3 << 29,
		"7EiB":   7 << 60, "9223372036854775807": 1<<63 - 1, "0.5K": 500, " 2 TB ": 2e12,
	} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "-1", "GiB", "1 XB", "1iB", "1e3", "8EiB", "99999999999999999999", "1.5.5G",
		"0x10", "1\n2"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
}
