// Pieces of a page: text that cannot become markup, and numbers as people read them.
#ifndef LOSSD_SERVER_TELEMETRY_STATUS_PAGE_HTML_H_
#define LOSSD_SERVER_TELEMETRY_STATUS_PAGE_HTML_H_

#include <string>
#include <string_view>

namespace lossd::telemetry {

// For text and for attributes in quotes.
std::string Escape(std::string_view text);

std::string BytesText(double bytes);       // "1.5 GiB"
std::string CountText(double count);       // "1,234", "56.7 k", "8.90 M"
std::string ValueText(double value);       // five digits: "2.3026", "1.2e-07", "NaN"
std::string DurationText(double seconds);  // "12.3 s", "4 min 5 s", "6 h 7 min", "8 d 9 h"

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_STATUS_PAGE_HTML_H_
